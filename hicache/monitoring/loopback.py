"""Recognises servers on this machine. Requests to them must not use the proxy that the environment names."""

from __future__ import annotations

import ipaddress
import urllib.parse
import urllib.request


def is_loopback(url: str) -> bool:
    """Return whether `url` names this machine by localhost or a loopback address. Resolves no names."""
    try:
        host = (urllib.parse.urlsplit(url).hostname or "").removesuffix(".")
        if host == "localhost" or host.endswith(".localhost"):
            return True
        address = ipaddress.ip_address(host)
    except ValueError:  # the host is a name other than localhost, or `url` is no URL
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback or (mapped or address).is_unspecified


def opener_for(url: str) -> urllib.request.OpenerDirector:
    """Return an opener for `url`. It uses the proxy of the environment unless `url` is on this machine."""
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_loopback(url) else []))
