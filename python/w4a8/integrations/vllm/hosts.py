"""Ranks on several machines: one ends if another has ended.

vLLM watches the processes of its own machine alone. A machine would wait for ever after the end of the first one, and
the first one, for an answer of another that has ended, until ``VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`` are over.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

import torch
from vllm.distributed import get_world_group
from vllm.utils.network_utils import get_ip

from w4a8.integrations.vllm.log import logger

_PATIENCE = 60  # seconds for other ranks to connect
# Of connections between ranks: a machine that does not answer for half a minute has ended.
_KEPT_ALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}
GRACE = 10  # seconds for vLLM to end a process in its way
_watched: list[socket.socket] = []


def watch(model: Any, vllm_config: Any, model_config: Any) -> None:
    """Lets this process end, with a line in the log, as soon as that of another rank has. Every rank calls this.

    The first rank is connected with all others: they end after it, and it after one of them.
    """
    if getattr(vllm_config.parallel_config, "nnodes_within_dp", 1) == 1 or _watched:
        return
    group = get_world_group()
    place: list[Any] = [None]
    try:
        try:
            if group.rank_in_group == 0:
                server = _listen()
                place[0] = server.getsockname()[:2]
        finally:  # the others wait for this
            torch.distributed.broadcast_object_list(place, src=group.ranks[0], group=group.cpu_group)
        if group.rank_in_group == 0:
            with server:
                for _ in group.ranks[1:]:
                    connection, _ = server.accept()
                    _start(connection, int.from_bytes(connection.recv(4), "little"))
        elif place[0] is None:
            raise OSError("the first rank does not listen")
        else:
            connection = socket.create_connection(place[0], _PATIENCE)
            connection.sendall(group.rank_in_group.to_bytes(4, "little"))
            _start(connection, 0)
    except OSError as error:
        logger().warning("w4a8: ranks of other machines are not watched: %s", error)


def _listen() -> socket.socket:
    address = get_ip()
    server = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    server.settimeout(_PATIENCE)
    return server


def _start(connection: socket.socket, rank: int) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in _KEPT_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
    _watched.append(connection)
    threading.Thread(target=_end_after, args=(connection, rank), daemon=True, name=f"w4a8 rank {rank}").start()


def _end_after(connection: socket.socket, rank: int) -> None:
    try:
        connection.recv(1)  # nothing is sent
        problem = "has ended"
    except OSError as error:
        problem = f"does not answer ({error})"
    logger().error("w4a8: rank %d %s: this rank ends, too", rank, problem)
    end()


def end() -> None:
    """Ends this process, also if its main thread waits in a call that signals do not end."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)
