"""JSON with values in it that are not what they should be."""

import copy

HUGE = [0, -1, 1, 2, 3, 7, 33, 2**31 - 1, 2**31, 2**40, 2**62, 2**63, -(2**63), 2**64, 10**30]
ODD = [[], {}, [1], [None], [[]], {"a": 1}, "re:(", "re:[", "re:.*", "Linear", "group", "int", "\x00", "ü"]


def paths_in(value, path=()):
    """Every place in nested JSON."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key in value:
            found += paths_in(value[key], (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            found += paths_in(item, (*path, i))
    return found


def put(value, path, new):
    """A copy of `new`: what is put into it later must not be in ODD, or in itself."""
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = copy.deepcopy(new)


def remove(value, path):
    for key in path[:-1]:
        value = value[key]
    del value[path[-1]]
