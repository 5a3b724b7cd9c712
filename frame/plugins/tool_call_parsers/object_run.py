"""Reads consecutive call objects, `{"name": …, "arguments": …}`, from the held text of a `Machine`:
`ObjectRun`, and `ObjectCalls`, a machine with a state that reads them. Must not know a mark."""

from __future__ import annotations

import re
from collections.abc import Container

from frame.plugins.tool_call_parsers.call_scanner import CallScanner
from frame.plugins.tool_call_parsers.machine import Machine

_KEYS = ("name", "arguments", "parameters", "type", "id")  # first keys of a call
_FIRST_KEY = re.compile(r"\s*\{\s*(?:\"(?P<key>[^\"]*)(?P<end>\"?))?")


class ObjectRun:
    """`read` until `is_over`: the next text is not a call object. `lead`: text before the first
    object, emitted if that is not a call; `separators`: allowed between objects, besides
    whitespace."""

    def __init__(self, machine: Machine, lead: str, separators: str, names: Container[str] | None = None) -> None:
        self.is_over = False
        self.num_calls = 0
        self._machine = machine
        self._lead = [lead]
        self._separators = separators + " \t\r\n"
        self._names = names
        self._scanner: CallScanner | None = None

    def read(self) -> bool:
        """Read held text. Returns whether the machine should continue."""
        machine = self._machine
        if self._scanner is None:
            if self.num_calls:
                machine.strip_held(self._separators)
            else:
                self._lead.append(machine.take_held(len(machine.held) - len(machine.held.lstrip())))
            if not machine.held:
                return False
            if machine.held[0] != "{":
                return self._stop("")
            self._scanner = CallScanner(self._names)
        scanner, was_started = self._scanner, self._scanner.is_started
        machine.take_held(scanner.feed(machine.held))
        if scanner.is_bad and not scanner.is_started:
            return self._stop(scanner.raw)
        if scanner.is_started:
            arguments = scanner.take_arguments()
            machine.emit_arguments(arguments) if was_started else machine.start_call(scanner.name or "", arguments)
        if not (scanner.is_bad or scanner.is_closed):
            return False
        self.num_calls += 1
        self._scanner = None
        self.is_over = scanner.is_bad
        return True

    @property
    def may_be_call(self) -> bool:
        """Whether the current object can become a call, by its first key. An object without a mark
        may be content in JSON."""
        match = None if self._scanner is None else _FIRST_KEY.match(self._scanner.raw)
        if match is None or match["key"] is None or any(lead.strip() for lead in self._lead):
            return True
        return any(key == match["key"] if match["end"] else key.startswith(match["key"]) for key in _KEYS)

    def end(self) -> None:
        """The text has ended: an object that did not become a call is content."""
        if self._scanner is None:
            if not self.num_calls:
                self._machine.emit_content("".join(self._lead))
        elif not self._scanner.is_started:
            self._stop(self._scanner.raw)

    def _stop(self, raw: str) -> bool:
        self._machine.emit_content(("".join(self._lead) if not self.num_calls else "") + raw)
        self.is_over = True
        return True


class ObjectCalls(Machine):
    """A machine whose calls are objects. `begin_objects` begins to read them, and `end_objects`
    chooses the state after them."""

    run: ObjectRun | None = None

    def begin_objects(self, lead: str, separators: str, names: Container[str] | None = None) -> bool:
        """Change to the state that reads objects; the arguments are those of `ObjectRun`."""
        self.run = ObjectRun(self, lead, separators, names)
        return self.set_state(self.read_objects)

    def read_objects(self) -> bool:
        """State: objects, up to what is none."""
        if self.run is None or not self.run.read():
            return False
        return not self.run.is_over or self.end_objects(self.run.num_calls)

    def end_objects(self, num_calls: int) -> bool:
        """Change the state: `num_calls` objects were calls, and the next text is none."""
        raise NotImplementedError

    def end(self) -> None:
        if self.read == self.read_objects and self.run is not None:
            self.run.end()
        else:
            super().end()
