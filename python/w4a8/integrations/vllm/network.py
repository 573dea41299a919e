"""Which of a machine's networks ranks of several machines meet on. vLLM is not imported."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

ADDRESS = "VLLM_HOST_IP"  # vLLM's own choice is the default route's
INTERFACE = "GLOO_SOCKET_IFNAME"  # gloo's is what the machine's name stands for, which is loopback in Debian
_SIOCGIFADDR = 0x8915  # of Linux: an interface's IPv4 address
_ADDRESSES = "/proc/net/if_inet6"  # of IPv6


def towards(host: str) -> dict[str, str]:
    """Variables with this machine's address and interface on the way to ``host``, but for those that are set.

    What is not known is left out: ``host`` has no address, or this machine calls itself by loopback's.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((host, 9))  # sends nothing
                address = probe.getsockname()[0]
                names = [name for name, found in _addresses(probe) if found == address]
        except OSError:
            continue
        if address == "::1" or address.startswith("127."):
            return {}
        found = {ADDRESS: address, INTERFACE: names[0]} if names else {ADDRESS: address}
        return {name: value for name, value in found.items() if name not in os.environ}
    return {}


def _addresses(probe: socket.socket) -> Iterator[tuple[str, str]]:
    """Interfaces, and an address of each."""
    for _, name in socket.if_nameindex():
        with suppress(OSError):  # none
            place = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            yield name, socket.inet_ntoa(place[20:24])
    with suppress(OSError), open(_ADDRESSES) as lines:
        for number, *_, name in map(str.split, lines):
            yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))
