"""Servers of remote stores are started at free ports."""

from __future__ import annotations

import pytest

from hicache.bench.common import BenchUnavailable
from hicache.bench.remote_servers import start_on_free_ports


@pytest.mark.parametrize("num_failures", [0, 2, 3])
def test_a_server_whose_port_was_taken_starts_at_other_ports(num_failures: int) -> None:
    """The ports of one start differ from each other. After three starts that failed, the error is raised."""
    tried: list[list[int]] = []

    def start(ports: list[int]) -> None:
        tried.append(ports)
        if len(tried) <= num_failures:
            raise BenchUnavailable("weed does not start")

    if num_failures < 3:
        start_on_free_ports(8, start)
    else:
        with pytest.raises(BenchUnavailable):
            start_on_free_ports(8, start)
    assert len(tried) == min(num_failures + 1, 3) and all(len(set(ports)) == 8 for ports in tried)
