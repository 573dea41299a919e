"""``python -m w4a8``: what is installed, what this CPU offers, and which kernel runs."""

import platform
import sys

import torch

import w4a8


def report() -> str:
    """The lines that ``python -m w4a8`` prints."""
    features = w4a8.cpu_features().split()
    lines = [
        f"w4a8      {w4a8.__version__}",
        f"torch     {torch.__version__}  (Python {platform.python_version()}, {platform.machine()})",
        f"threads   {torch.get_num_threads()}",
        f"features  {' '.join(features) or '(none that a kernel asks for)'}",
        "kernels   (best first)",
    ]
    active = w4a8.active_kernel()
    kernels = w4a8.kernels()
    width = max(len(kernel["name"]) for kernel in kernels)
    for kernel in kernels:
        state = "turned off" if kernel["turned_off"] else "supported" if kernel["supported"] else "not supported"
        mark = "->" if kernel["name"] == active else "  "
        lacking = [name for name in kernel["needs"].split() if name not in features]
        lacks = f"  lacks: {' '.join(lacking)}" if lacking else ""
        lines.append(f"  {mark} {kernel['name']:<{width}}  {state:<13}  needs: {kernel['needs'] or 'nothing'}{lacks}")
        if kernel["turned_off"]:
            lines.append(f"     {'':<{width}}  since {kernel['turned_off']}")
    lines.append(f"active    {active}")
    return "\n".join(lines)


def main() -> int:
    try:
        print(report())
    except ValueError as error:  # W4A8_KERNEL names no kernel of this CPU, or one that is turned off
        print(f"w4a8: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
