"""The command ``w4a8`` (docs/command.md): one module for each subcommand.

Exit codes: 0, good; 1, the model or the machine is not fit for the task; 2, wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import w4a8
from w4a8.command import bench, chat, doctor, inspect, pack, serve, verify, verify_server
from w4a8.command.report import UsageError

COMMANDS = {
    "doctor": doctor,
    "inspect": inspect,
    "pack": pack,
    "verify": verify,
    "chat": chat,
    "bench": bench,
    "serve": serve,
    "verify-server": verify_server,
}
_GIVE_ON = ("serve",)  # subcommands that pass unknown arguments to another program
# Errors whose message is for the user. SafetensorError is caught by its name: safetensors may not be installed.
_SAID = (ValueError, OSError, ImportError, RuntimeError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the arguments without the program's name; None: the arguments of the process.

    Returns:
        The exit code.
    """
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout when it exits
        return 0
    except SystemExit as stop:  # argparse has printed the reason
        return stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except UsageError as error:
        return _say(error, 2)
    except Exception as error:
        if not isinstance(error, _SAID) and type(error).__name__ != "SafetensorError":
            raise
        return _say(error, 1)


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args, args.rest = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    if args.rest and args.command not in _GIVE_ON:
        parser.error(f"unrecognized arguments: {' '.join(args.rest)}")
    return COMMANDS[args.command].run(args)


def _say(error: Exception, code: int) -> int:
    """Prints an error as one line, and returns the exit code."""
    print(f"w4a8: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="w4a8",
        description="Language models with 4-bit weights and 8-bit activations on CPUs.",
        epilog="`w4a8 COMMAND --help` tells more. Exit codes: 0 good, 1 the model or the machine is not fit, 2 usage.",
    )
    parser.add_argument("--version", action="version", version=f"w4a8 {w4a8.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, module in COMMANDS.items():
        text = module.__doc__.partition("\n")[0]
        below = commands.add_parser(
            name,
            help=text,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(below)
    return parser
