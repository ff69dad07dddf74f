"""Accesses to shared memory, in PTX, that two functions make with no barrier between them.

Triton places the barriers of a block itself. Where a function is called that is not inlined,
Triton up to 3.7 looks at what the function leaves behind at its end alone, not at what it does
first (triton-lang/triton#11326): the caller's last load may then lie beside the callee's first
store, and a warp that comes late reads what another one has written for a later purpose. Where
that happens the callee begins with `tl.debug_barrier()`; this finds where it has to.

Places are not compared: accesses to different buffers count as well, so what is found here may be
harmless, and what is not found is not there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

_HEADER = re.compile(r"(?:\.entry|\.func)\s+(?:\([^)]*\)\s*)?([\w$]+)\s*\(")
_LABEL = re.compile(r"([\w$]+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+([\w$]+)")
_CALL = re.compile(r"\bcall(?:\.uni)?\s+(?:\([^)]*\),\s*)?([\w$]+)")
_BARRIER = re.compile(r"\bbar(?:rier)?(?:\.cta)?\.sync\b")  # not a warp's
_STORE = re.compile(r"\b(?:st|atom|red|stmatrix)\b[\w.]*\.shared|\bcp\.async[\w.]*\.shared")
_LOAD = re.compile(r"\b(?:ld|ldmatrix)\b[\w.]*\.shared")
_LAST_NAME = re.compile(r".*_\$_(\w+?)__")


class Access(NamedTuple):
    stores: bool
    function: str
    line: int

    def __str__(self) -> str:
        name = _LAST_NAME.match(self.function)
        what = "store" if self.stores else "load"
        return f"{what} in {name.group(1) if name else self.function}, line {self.line}"


class Hazard(NamedTuple):
    first: Access
    second: Access

    def __str__(self) -> str:
        return f"{self.first} -> {self.second}"


class _Step(NamedTuple):
    """What counts of a function. kind: access, barrier, call, branch, goto, return, or leave, which
    may return."""

    kind: str
    line: int
    target: str = ""  # of a call or a branch
    stores: bool = False


@dataclass
class _Function:
    """Its steps, what may come after each, and what is known of it so far.

    first: accesses that may be made before any barrier; left: those that may be pending at its
    end; passes: whether it may end without a barrier.
    """

    steps: list[_Step] = field(default_factory=list)
    next: list[list[int]] = field(default_factory=list)
    first: frozenset[Access] = frozenset()
    left: frozenset[Access] = frozenset()
    passes: bool = False


def _step(text: str, line: int) -> _Step | None:
    """What is not understood is an error: to pass over it would be to find nothing."""
    assert not re.search(r"\bbrx\.idx|/\*", text), text
    conditional = text.startswith("@")
    if re.match(r"(@!?%\w+\s+)?call\b", text):
        call = _CALL.search(text)
        assert call and not conditional, text
        return _Step("call", line, call.group(1))
    if branch := _BRANCH.search(text):
        return _Step("branch" if conditional else "goto", line, branch.group(1))
    if _BARRIER.search(text):
        assert not conditional and re.search(r"sync\S*\s+0;", text), text
        return _Step("barrier", line)
    if _STORE.search(text):
        return _Step("access", line, stores=True)
    if _LOAD.search(text):
        return _Step("access", line)
    if re.match(r"(@!?%\w+\s+)?(ret|exit)\b", text):
        return _Step("leave" if conditional else "return", line)
    return None


def _functions(ptx: str) -> dict[str, _Function]:
    functions: dict[str, _Function] = {}
    header = ""
    labels: dict[str, int] = {}
    current: _Function | None = None
    end = "}"
    for line, raw in enumerate(ptx.splitlines(), 1):
        text = raw.split("//")[0].strip()
        if current is None:
            header = f"{header} {text}" if header else text
            if text == "{":
                current, labels, end = _Function(), {}, "\t}"
                if name := _HEADER.search(header):  # else a section of the debugger's
                    functions[name.group(1)] = current
                    end = "}"
            assert _step(text, line) is None, "outside of functions: " + text
            if text == "{" or text.endswith(";") or not _may_be_header(header):
                header = ""
        elif raw.rstrip() in ("}", end):
            _link(current, labels)
            current = None
        elif label := _LABEL.fullmatch(text):
            labels[label.group(1)] = len(current.steps)
        elif step := _step(text, line):
            current.steps.append(step)
    assert current is None, "a function without an end"
    return functions


def _may_be_header(text: str) -> bool:
    return ".entry" in text or ".func" in text


def _link(function: _Function, labels: dict[str, int]) -> None:
    for i, step in enumerate(function.steps):
        after: list[int] = [] if step.kind in ("return", "goto") else [i + 1]
        if step.kind in ("branch", "goto"):
            after.append(labels[step.target])
        function.next.append(after)


def _conflicts(pending: Iterable[Access], access: Access) -> Iterator[Hazard]:
    for before in pending:
        if before.stores or access.stores:
            yield Hazard(before, access)


def _follow(name: str, functions: dict[str, _Function], hazards: set[Hazard]) -> bool:
    """Goes through a function, by what is known of those that it calls; whether that changed it."""
    function = functions[name]
    number = len(function.steps)
    nothing: tuple[frozenset[Access], bool] = (frozenset(), True)
    before: list[tuple[frozenset[Access], bool] | None] = [nothing] + [None] * number
    first: set[Access] = set()
    left: set[Access] = set()
    passes = False
    waiting = [0]
    while waiting:
        i = waiting.pop()
        state = before[i]
        assert state is not None
        pending, untouched = state
        step = function.steps[i] if i < number else _Step("return", 0)
        if step.kind == "barrier":
            pending, untouched = frozenset(), False
        elif step.kind == "access":
            access = Access(step.stores, name, step.line)
            # What a function does by itself Triton has looked at.
            others = (before for before in pending if before.function != name)
            hazards.update(_conflicts(others, access))
            if untouched:
                first.add(access)
            pending |= {access}
        elif step.kind == "call":
            callee = functions[step.target]
            for access in callee.first:
                hazards.update(_conflicts(pending, access))
            if untouched:
                first |= callee.first
            pending = (pending if callee.passes else frozenset()) | callee.left
            untouched = untouched and callee.passes
        elif step.kind in ("return", "leave"):
            left |= pending
            passes = passes or untouched
        for after in function.next[i] if i < number else []:
            old = before[after]
            new = (pending, untouched)
            if old is not None:
                new = (old[0] | pending, old[1] or untouched)
            if new != old:
                before[after] = new
                waiting.append(after)
    known = (function.first, function.left, function.passes)
    function.first, function.left, function.passes = frozenset(first), frozenset(left), passes
    return known != (function.first, function.left, function.passes)


def hazards_of(ptx: str) -> list[str]:
    """Accesses of two functions, or of two calls of one, with no barrier of the block in between.
    One of them stores."""
    functions = _functions(ptx)
    while True:
        hazards: set[Hazard] = set()
        changed = [_follow(name, functions, hazards) for name in functions]
        if not any(changed):
            return [str(hazard) for hazard in sorted(hazards)]
