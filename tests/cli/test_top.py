"""`hicache top` without hicache's server: wrong addresses, a server that ends, and the figures of two readings."""

from __future__ import annotations

import contextlib
import http.server
import io
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from rich.console import Console

from cli_case import refused
from hicache.cli import main
from hicache.console import scaled
from hicache.errors import NotOurServer
from hicache.monitoring.client import MetricsClient
from hicache.monitoring.figures import FIGURES
from hicache.monitoring.loopback import is_loopback
from hicache.monitoring.readings import Change, History, Reading
from hicache.monitoring.server_figures import SGLANG as SGLANG_FIGURES
from hicache.monitoring.server_figures import VLLM as VLLM_FIGURES
from hicache.monitoring.top import frame
from programs import command
from waiting import eventually

OURS = '{"time_s": 1.0, "figures": {"requests.running": 3, "requests.waiting": 4}}'


@contextlib.contextmanager
def http_server(status: int, text: str, port: int = 0, path: str = "") -> Iterator[tuple[str, int]]:
    """Serve the text at `path`, or at every path, and status 404 elsewhere. Yields host and port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if path in ("", self.path) else 404)
            self.send_header("Content-Type", "text/plain")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with http.server.HTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield "127.0.0.1", server.server_port
        finally:
            server.shutdown()
            thread.join()


# Lines of a vLLM 0.32 with HiCacheOffloadingSpec and a disk. One label has a quote, and there are two engines.
VLLM = r"""
# TYPE vllm:num_requests_running gauge
process_start_time_seconds 1.79600820691e+09
vllm:num_requests_running{engine="0",model_name="/models/a \"b\", c"} 2.0
vllm:num_requests_running{engine="1",model_name="/models/a \"b\", c"} 3.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:prompt_tokens_total{engine="0"} 4000.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 1000.0
vllm:prompt_tokens_cached_total{engine="0"} 3000.0
vllm:prompt_tokens_cached_by_source_total{engine="0",source="device"} 1000.0
vllm:prompt_tokens_cached_by_source_total{engine="0",source="host"} 1600.0
vllm:prompt_tokens_cached_by_source_total{engine="0",source="disk"} 400.0
vllm:generation_tokens_total{engine="0"} 16.0
vllm:kv_offload_load_bytes_total{engine="0"} 2e+09
vllm:kv_offload_load_time_total{engine="0"} 0.5
vllm:hicache_host_used_bytes{engine="0"} 3e+09
vllm:hicache_host_total_bytes{engine="0"} 6e+09
vllm:hicache_disk_file_bytes{store="/nvme/x"} 1e+09
vllm:hicache_disk_budget_bytes{store="/nvme/x"} 4e+09
vllm:hicache_missed_tokens_total{reason="evicted"} 700.0
vllm:hicache_load_gate_loads_total{decision="declined",store="/nvme/x"} 5.0
vllm:hicache_disk_corrupt_pages_total{store="/nvme/x"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="10.0"} 2.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 2.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5"} 2.0
a line of something else
vllm:prompt_tokens_total{engine="0"} many
"""

ANSWERS = [(404, "not here"), (500, OURS), (200, "<!DOCTYPE html><p>Welcome"), (200, '{"a": 1}'), (200, "[" * 100_000)]
ANSWERS += [(200, ""), (200, '{"figures": []}'), (200, '{"figures": {"a": 1}}')]


@pytest.mark.parametrize(("status", "text"), ANSWERS, ids=[f"{status}-{text[:9]}" for status, text in ANSWERS])
def test_another_server_is_one_line(status: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """If the server is not hicache's, the command ends with status 2 and one line that names the server."""
    with http_server(status, text) as (host, port):
        found = refused(capsys, "top", f"{host}:{port}")
    assert f"http://{host}:{port} is neither hicache serve nor vLLM nor SGLang: " in found


def test_a_proxy_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a proxy in the environment, as in a company, `top` uses the proxy only for other machines."""
    with http_server(502, "a proxy") as (host, port), http_server(200, OURS) as (_, own):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://{host}:{port}")
        for here in ("127.0.0.1", "localhost"):
            assert MetricsClient(f"{here}:{own}").read().figures["requests.running"] == 3
        with pytest.raises(NotOurServer, match="502"):
            MetricsClient("hicache.invalid:8000").read()
    hosts = ("127.8.9.1", "LOCALHOST", "localhost.", "a.localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0")
    assert all(is_loopback(f"http://{host}:80/v1") for host in hosts)
    others = ("http://10.0.0.1", "http://localhost.example", "http://[::2]", "no URL", "http://[")
    assert not any(map(is_loopback, others))


def test_an_address_where_no_server_speaks_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A closed port, and a server that does not speak HTTP, give one line with the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        assert f"{url} is neither hicache serve nor vLLM nor SGLang: " in refused(capsys, "top", url)
        thread.join()
    found = refused(capsys, "top", url)
    assert f"no server at {url}: " in found and "'hicache serve', vLLM or SGLang" in found


def test_a_vllm_with_hicache_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """`top` shows the tiers, transfers, reasons and faults of a vLLM's /metrics, summed over engines. Absent figures
    are shown as `-`."""
    with http_server(200, VLLM, path="/metrics") as (host, port):
        client = MetricsClient(f"{host}:{port}/metrics")
        reading = client.read()
        assert main(["top", "--once", f"{host}:{port}"]) == 0
    assert reading.get("requests.running") == 5 and reading.get("prompt.tokens") == 4000
    assert [reading.hit_rate(tier) for tier in reading.tiers] == [0.25, 0.4, 0.1]
    assert reading.quantile("first_token_s", 0.5) == 0.1 and reading.quantile("first_token_s", 0.99) <= 0.5
    shown = capsys.readouterr().out
    assert "running 5   waiting 1" in shown and "corrupt pages 1" in shown and "4.0 GB/s" in shown
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert (
        lines["host"][1:5] == ["3.0", "GB", "6.0", "GB"]
        and lines["host"][-2:] == ["40.0%", "-"]
        and lines["disk"][1:3] == ["1.0", "GB"]
    )
    assert "evicted" in shown and "computed instead" in shown and "700" in shown


@pytest.mark.parametrize("table", [FIGURES, VLLM_FIGURES, SGLANG_FIGURES], ids=["hicache", "vllm", "sglang"])
def test_the_frame_fits_into_80_columns(table: Mapping[str, object]) -> None:
    """With wide values of every figure no text is cut, and no number is separated from its name."""
    sizes = {"requests": 128, "faults": 70_900, "drive": 12.3, "saved_s": 2_674_800, "moved_s": 1.5}
    figures = {name: sizes.get(name.split(".")[0], 188_800_000 * (1 + len(name))) for name in table}
    figures["server.start_time_s"] = 0.0
    history = History(Reading(0, dict.fromkeys(figures, 0.0)), 10)
    history.add(Reading(10, figures))
    shown = {}
    for width in (80, 200):
        console = Console(width=width, file=io.StringIO())
        console.print(frame("http://127.0.0.1:8000", history))
        shown[width] = console.file.getvalue()
    assert "…" not in shown[80]
    tables = {width: text[text.index("\ntier") :].split() for width, text in shown.items()}
    assert tables[80] == tables[200]
    for figure, label in history.last.group("faults"):
        assert f"{label} {scaled(figures[figure])}" in shown[80], figure


def test_a_vllm_that_goes_away_is_named_by_its_own_route(capsys: pytest.CaptureFixture[str]) -> None:
    """A vLLM that no longer exports hicache's metrics is no hicache server. vLLM 0.32 answers /metrics.json with its
    /metrics."""
    with http_server(200, VLLM) as (host, port):
        client = MetricsClient(f"{host}:{port}")
        client.read()
    with http_server(200, "up 1\n", port) as _, pytest.raises(NotOurServer, match="not those of vLLM"):
        client.read()


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/metrics", "/dashboard"])
def test_every_address_of_a_server_will_do(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An address works with or without a scheme or a route. `--once` prints the requests and ends with status 0."""
    with http_server(200, OURS) as (host, port):
        assert main(["top", "--once", f"{host}:{port}{path}"]) == 0
    assert "running 3   waiting 4" in capsys.readouterr().out


def test_a_server_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    """While the server does not answer, the last figures stay, with a line that says so. Then the new ones are shown.
    Ctrl-C ends the command with status 0."""
    out = tmp_path / "out"
    with contextlib.ExitStack() as first:
        host, port = first.enter_context(http_server(200, OURS))
        with out.open("w") as file:
            program = command("top", f"{host}:{port}", "--interval", "0.1", stdout=file)
        with program:
            shows(out.read_text, "running 3   waiting 4")
            first.close()
            shows(out.read_text, f"no server at http://{host}:{port}: Connection refused; trying again")
            with http_server(200, OURS.replace("4", "5"), port=port):
                shows(out.read_text, "running 3   waiting 5")
                program.send_signal(signal.SIGINT)
                assert program.wait() == 0


def shows(read: Callable[[], str], expected: str) -> None:
    eventually(lambda: expected in read(), read)


def reading(time_s: float, start_time_s: float = 1.0, **figures: float) -> Reading:
    named = {name.replace("__", "."): value for name, value in figures.items()}
    return Reading(time_s, {"server.start_time_s": start_time_s, **named})


def test_what_two_readings_say() -> None:
    """Rates and hit rates are those of the window, or since the start. After a restart of the server they begin again.
    Events without any occurrence have no rate."""
    history = History(reading(0, prompt__tokens=1000, hit_tokens__host=100, tokens__computed=900), window_s=10)
    assert history.change is None and history.last.hit_rate("host") == 0.1
    for second in range(1, 31):
        more = 10.0 * second
        history.add(
            reading(
                second, prompt__tokens=1000 + more, hit_tokens__host=100 + more / 2, tokens__computed=900 + more / 2
            )
        )
    change = history.change
    assert change is not None and change.after.time_s - change.before.time_s == 10
    assert change.per_s("tokens.computed") == 5 and change.of("prompt.tokens") == 100
    assert change.hit_rate("host") == 0.5 and history.last.hit_rate("host") == 250 / 1300
    history.add(reading(100, prompt__tokens=1300))
    assert history.change is not None and history.change.before.time_s == 30, "the last two are kept in any case"
    assert history.change.hit_rate("host") is None, "no prompt since"
    assert reading(1, used__host=1, hit_tokens__remote=0).tiers == ["host"]
    assert reading(1, used__host=1, hit_tokens__remote=1).tiers == ["host", "remote"]
    history.add(reading(101, start_time_s=2.0))
    assert history.change is None and history.last.hit_rate("host") is None
    history.add(reading(102, start_time_s=2.0, prompt__tokens=50))
    assert history.change is not None
    history.add(reading(103, start_time_s=2.0, prompt__tokens=40))
    assert history.change is None, "fewer tokens: a restart of a server that reports no start time"


def test_quantiles_are_of_the_window() -> None:
    """Quantiles of a histogram are interpolated between its bounds, as Prometheus does, over the observations of the
    window. Without an observation there is none; above all bounds it is the largest bound."""
    name = "first_token_s"

    def observed(time_s: float, *counts: float) -> Reading:
        bounds = ("0.1", "0.5", "2.0", "+Inf")
        return Reading(time_s, {f"{name}.{bound}": count for bound, count in zip(bounds, counts, strict=True)})

    first, later = observed(0, 100, 100, 100, 100), observed(1, 100, 120, 150, 200)
    assert reading(0).quantile(name, 0.5) is None and Change(first, first).quantile(name, 0.5) is None
    assert first.quantile(name, 0.5) == 0.05 and later.quantile(name, 0.55) == pytest.approx(0.3)
    change = Change(first, later)
    assert [change.quantile(name, share) for share in (0.1, 0.2, 0.35, 0.5, 0.99)] == pytest.approx(
        [0.3, 0.5, 1.25, 2, 2]
    )
