"""Which of a machine's networks ranks of several machines meet on. vLLM is not imported."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

ADDRESS = "VLLM_HOST_IP"  # vLLM's own choice is the default route's
INTERFACE = "GLOO_SOCKET_IFNAME"  # gloo's is what the machine's name stands for, which is loopback in Debian
_SIOCGIFADDR = 0x8915  # of Linux: an interface's address


def towards(host: str) -> dict[str, str]:
    """Variables with this machine's IPv4 address and interface on the way to ``host``, but for those that are set.

    What is not known is left out: ``host`` has no such address, or this machine calls itself by loopback's.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
            address = probe.getsockname()[0]
        except OSError:
            return {}
        names = [name for _, name in socket.if_nameindex() if _address(probe, name) == address]
    if address.startswith("127."):
        return {}
    found = {ADDRESS: address}
    if names:
        found[INTERFACE] = names[0]
    return {name: value for name, value in found.items() if name not in os.environ}


def _address(probe: socket.socket, interface: str) -> str | None:
    try:
        found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except OSError:  # none
        return None
    return socket.inet_ntoa(found[20:24])
