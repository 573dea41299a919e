"""JSON with values in it that are not what they should be."""

import copy
import math

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


def damaged(whole):
    """An object with one value that is another, is missing, or has another name: all of them."""
    names = ["re:(", "(", "[", "*", "+:(", "-:(", "", "²", "a.*b", "\x00"]
    values = [None, True, False, *HUGE, 4.0, 8.0, 16.0, 32.0, math.nan, math.inf, *ODD, "", "²", "re:\x00"]
    for place in paths_in(whole):
        config = copy.deepcopy(whole)
        remove(config, place)
        yield config
        for value in values:
            config = copy.deepcopy(whole)
            put(config, place, value)
            yield config
        for name in names if isinstance(place[-1], str) else ():
            config = copy.deepcopy(whole)
            owner = config
            for key in place[:-1]:
                owner = owner[key]
            owner[name] = owner.pop(place[-1])
            yield config
