"""Folders of the repository. Importing this module also lets lab/ import the modules of benchmarks/."""

import sys
from pathlib import Path

LAB = Path(__file__).resolve().parent
ROOT = LAB.parent
BENCHMARKS = ROOT / "benchmarks"  # what users run
NATIVE = ROOT / "build/bench/benchmarks"  # what `make bench` compiles
RESULTS = LAB / "results"
RECORDS = ROOT / "build/results"  # JSON of what the tables in RESULTS show
# The demo prints figures of accuracy.md, which is therefore not in lab/.
ACCURACY_RESULTS = BENCHMARKS / "results"

if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))
