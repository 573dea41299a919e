"""Writes a wheel again with the same files in fewer bytes: deflate as zopfli searches it, which every pip reads.

usage: compress_wheel.py WHEEL...
"""

import os
import sys
import zipfile

import zopfli

for wheel in sys.argv[1:]:
    smaller = wheel + ".smaller"
    with zipfile.ZipFile(wheel) as old, zopfli.ZipFile(smaller, "w", iterations=5) as new:
        for entry in old.infolist():
            new.writestr(entry, old.read(entry))
    os.replace(smaller, wheel)
