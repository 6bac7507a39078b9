"""Certificates of proofs for any number of microbatches, with a mistake."""

import copy
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from schedlang.extras.prove.certificates import what_it_proves
from schedlang.extras.prove.check_orders import Wrong

#: Where a number or a word stands in a certificate: keys and indices, one within the other.
Place = tuple[Any, ...]


def places(certificate: Mapping[str, Any]) -> list[Place]:
    """Where the numbers and words stand in a certificate."""
    return list(_leaves(certificate))


def _leaves(value: Any, place: Place = ()) -> Iterator[Place]:
    if isinstance(value, Mapping):
        for key, of in value.items():
            yield from _leaves(of, (*place, key))
    elif isinstance(value, list):
        for index, of in enumerate(value):
            yield from _leaves(of, (*place, index))
    else:
        yield place


def changed(certificate: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
    """The certificate with another number or word at a place."""
    document = copy.deepcopy(certificate)
    within: Any = document
    for step in place[:-1]:
        within = within[step]
    old = within[place[-1]]
    within[place[-1]] = old + 1 if isinstance(old, int) else f"{old}x"
    return document


def damaged_certificate(
    certificate: Mapping[str, Any], rng: Random
) -> tuple[Mapping[str, Any], Place]:
    """The certificate with one mistake, and where it is."""
    place = rng.choice(places(certificate))
    return changed(certificate, place), place


def is_refused(certificate: Mapping[str, Any]) -> bool:
    """Whether `schedc check` refuses a certificate."""
    try:
        what_it_proves(certificate)
    except Wrong:
        return True
    return False
