"""gpu/check.py with tiny sizes, on a device that stands in for a GPU, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")

LAB = Path(__file__).resolve().parents[1]


def test_the_check_runs(tmp_path):
    """All stages; what is wrong would end the program. Only that it goes through is known of the speeds."""
    paths = [str(LAB / "gpu"), str(LAB.parent / "tests" / "python"), os.environ.get("PYTHONPATH", "")]
    found = tmp_path / "found.json"
    code = f"import standin_device, check; check.main(['--device', 'standin', '--small', '--json', {str(found)!r}])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(found.read_text())
    assert answer["bits of a layer"] == "equal to the CPU's" and answer["four threads, staged"] == "equal"
    assert answer["four threads, queued"] == "equal"
    assert answer["loaded"] == {"relative error": 0.0, "same text": True}
    assert answer["moved back to the CPU"] == "same bits"
    for way in ("staged", "queued"):
        beside = answer[f"experts beside, {way}, prompt of 16, 48 layers"]
        assert all(number > 0 for number in beside.values())
