"""Which servers are on this very machine: a proxy of the environment, which is for others, is not asked for them."""

from __future__ import annotations

import ipaddress
import urllib.parse
import urllib.request


def is_loopback(url: str) -> bool:
    """Whether `url` names this machine by localhost or by a loopback address; no name is looked up."""
    try:
        host = (urllib.parse.urlsplit(url).hostname or "").removesuffix(".")
        if host == "localhost" or host.endswith(".localhost"):
            return True
        address = ipaddress.ip_address(host)
    except ValueError:  # another name, or no URL
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback or (mapped or address).is_unspecified


def opener_for(url: str) -> urllib.request.OpenerDirector:
    """What opens `url`, through a proxy of the environment where that is for it."""
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_loopback(url) else []))
