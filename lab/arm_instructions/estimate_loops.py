#!/usr/bin/env python3
"""usage: estimate_loops.py LIBRARY [LLVM_MCA]: what llvm-mca expects of the kernels' inner loops on Neoverse cores.

The loops are found in the disassembly of libw4a8_core.a: of a function, the innermost loop with most multiplies, and
with groups the loop around it, in which the inner one runs as often as a group has blocks of 32. Printed are the
instructions of the loop, multiply-accumulates per cycle and their share of what llvm-mca gives for the multiply alone.
Memory is a first-level cache that always hits: an upper limit, not a measurement.
"""

import re
import subprocess
import sys

CORES = ["neoverse-n1", "neoverse-v1", "neoverse-n2", "neoverse-v2"]
MULTIPLIES = {"smmla": 32, "sdot": 16, "smull": 8, "smull2": 8, "smlal": 8, "smlal2": 8}  # products an instruction
LACKS = {("neoverse-n1", "smmla")}

# kernel, M, group, function, times that its inner loop runs per loop around it (0: there is none).
LOOPS = [
    ("arm_i8mm", 64, "-", "Pairs::channelwise<3>", 0),
    ("arm_i8mm", 64, "128", "Pairs::add_groups<3, 0, 16l, true, 0>", 0),
    ("arm_i8mm", 64, "32", "Pairs::add_groups<3, 0, 4l, true, 0>", 0),
    ("arm_dotprod", 64, "-", "tile<ManyOps, 5, 1, 0, 3>", 0),
    ("arm_dotprod", 64, "128", "ManyOps::add_half<4, 0, 0l, true, 0>", 4),
    ("arm_dotprod", 64, "32", "ManyOps::add_half<4, 0, 4l, true, 0>", 0),
    ("arm_dotprod", 1, "-", "tile<FewOps<0>, 1, 2, 0, 0>", 0),
    ("arm_dotprod", 1, "128", "tile<FewOps<0>, 1, 2, 2, 0>", 4),
    ("arm_dotprod", 1, "32", "tile<FewOps<0>, 1, 2, 2, 0>", 1),
]


def disassemble(library):
    """{(kernel, function): [(address, mnemonic, operands)]}"""
    text = subprocess.run(
        ["aarch64-linux-gnu-objdump", "-d", "-C", "--no-show-raw-insn", library],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    functions = {}
    kernel, body = "", []
    for line in text.splitlines():
        if match := re.match(r"(\w+)\.cpp\.o:", line):
            kernel = match[1]
        elif match := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            name = re.sub(r"^void |w4a8::isa::|\(anonymous namespace\)::", "", match[1])
            name = re.sub(r"\((?:w4a8::ScaleType|w4a8::Code|Grouping|RowScales)\)", "", name)
            body = functions.setdefault((kernel, re.sub(r"\(.*", "", name)), [])
        elif match := re.match(r" *([0-9a-f]+):\t(\S+)(?:\t(.*))?$", line):
            operands = re.sub(r" *//.*", "", match[3] or "")
            body.append((int(match[1], 16), match[2], operands))
    return functions


def target(instruction):
    """The address a branch goes to, None for everything else."""
    _, mnemonic, operands = instruction
    match = re.search(r"\b([0-9a-f]+) <", operands)
    return int(match[1], 16) if match and re.match(r"b(\.\w+)?$|cbn?z|tbn?z", mnemonic) else None


def loops(body):
    """[(first, last)]: indices into body, for each start the longest loop."""
    index = {address: i for i, (address, _, _) in enumerate(body)}
    ends = {}
    for i, instruction in enumerate(body):
        start = index.get(target(instruction))
        if start is not None and start <= i:
            ends[start] = max(i, ends.get(start, i))
    return sorted(ends.items())


def products(instructions):
    return sum(MULTIPLIES.get(mnemonic, 0) for _, mnemonic, _ in instructions)


def inner_loop(body, repeats):
    """The instructions of one pass, the inner loop's `repeats` times."""
    found = loops(body)

    def inside(a, b):
        return a != b and b[0] <= a[0] and a[1] <= b[1]

    innermost = [a for a in found if not any(inside(b, a) for b in found)]
    first, last = max(innermost, key=lambda loop: products(body[loop[0] : loop[1] + 1]))
    inner = body[first : last + 1]
    if repeats == 0:
        return inner
    begin, end = min((b for b in found if inside((first, last), b)), key=lambda b: b[1] - b[0])
    return body[begin:first] + repeats * inner + body[last + 1 : end + 1]


def assembly(instructions):
    lines = ["loop:"]
    for instruction in instructions:
        _, mnemonic, operands = instruction
        if target(instruction) is not None:
            operands = re.sub(r"\b[0-9a-f]+ <.*", "loop", operands)
        lines.append(f"{mnemonic} {operands}")
    return "\n".join(lines) + "\n"


def cycles(mca, core, text):
    """Cycles of one pass of `text` among many."""
    passes = 200
    command = [mca, "-mtriple=aarch64", f"-mcpu={core}", "-mattr=+dotprod,+i8mm", f"-iterations={passes}"]
    run = subprocess.run([*command, "--all-views=0", "--summary-view"], input=text, capture_output=True, text=True)
    match = re.search(r"Total Cycles: +(\d+)", run.stdout)
    if not match:
        sys.exit(f"{' '.join(command)}:\n{run.stderr}")
    return int(match[1]) / passes


def peak(mca, core, mnemonic):
    """Products per cycle of independent multiplies alone."""
    operands = "v30.16b, v31.16b"
    text = "".join(f"{mnemonic} v{i}.4s, {operands}\n" for i in range(24))
    return 24 * MULTIPLIES[mnemonic] / cycles(mca, core, text)


def main():
    library = sys.argv[1]
    mca = sys.argv[2] if len(sys.argv) > 2 else "llvm-mca-19"
    functions = disassemble(library)
    version = subprocess.run([mca, "--version"], check=True, capture_output=True, text=True).stdout
    print(f"inner loops as llvm-mca {re.search(r'version ([0-9.]+)', version)[1]} sees them: ", end="")
    print("multiply-accumulates per cycle (share of the multiply's peak)\n")
    print("| kernel      |  M | group | per MAC | " + " | ".join(f"{core[9:]:<13}" for core in CORES) + " |")
    print("|-------------|---:|------:|--------:|" + len(CORES) * "--------------:|")
    for kernel, m, group, function, repeats in LOOPS:
        body = functions.get((kernel, function))
        if body is None:
            sys.exit(f"{library} has no {function} in {kernel}")
        instructions = inner_loop(body, repeats)
        count = products(instructions)
        multiply = next(mnemonic for _, mnemonic, _ in instructions if mnemonic in MULTIPLIES)
        cells = []
        for core in CORES:
            if (core, multiply) in LACKS:
                cells.append("none")
                continue
            rate = count / cycles(mca, core, assembly(instructions))
            cells.append(f"{rate:.1f} ({100 * rate / peak(mca, core, multiply):.0f} %)")
        row = " | ".join(f"{cell:>13}" for cell in cells)
        print(f"| {kernel:<11} | {m:>2} | {group:>5} | {len(instructions) / count:7.4f} | {row} |")
    print("\nper MAC: instructions of the loop alone per multiply-accumulate; group -: channelwise")


if __name__ == "__main__":
    main()
