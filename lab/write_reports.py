#!/usr/bin/env python3
"""Writes the Markdown files of lab/results and benchmarks/results from the JSON beside them; nothing is measured."""

import argparse
import json
from pathlib import Path

import accuracy.report
import models.report
import peers.report
from folders import ACCURACY_RESULTS, RESULTS


def document(found: dict) -> str:
    """Markdown of what any of the benchmarks in Python wrote as JSON."""
    if "models" in found:
        return accuracy.report.document(found)
    if any("rates" in record for record in found["records"]):
        return models.report.document(found)
    return peers.report.document(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="JSON (default: all of both folders)")
    for path in parser.parse_args().files or [*RESULTS.glob("*.json"), *ACCURACY_RESULTS.glob("*.json")]:
        path.with_suffix(".md").write_text(document(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
