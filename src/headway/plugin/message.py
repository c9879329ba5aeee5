"""How a verdict reaches JUnit's file: as the message's first word, without pytest's `Failed:`."""

from __future__ import annotations

import pytest
from _pytest._code.code import ReprFileLocation

from headway.report import private, text
from headway.verdict import Finding


def told(finding: Finding) -> str:
    """Return a finding for a person, as reports tell it: its message, then its explanation."""
    lines = private.here().texts((finding.message, *finding.explanation))
    return "\n  ".join(map(text.plain, lines))


class Message(str):
    """A failure's text, which also is its one-line summary."""

    @property
    def reprcrash(self) -> ReprFileLocation:
        """Where pytest looks for the summary."""
        return ReprFileLocation("", 0, str(self).partition("\n")[0])


def shown_plainly(report: pytest.TestReport, call: pytest.CallInfo[None]) -> None:
    """Replace what pytest makes of `pytest.fail(text, pytrace=False)` by the text itself."""
    error = call.excinfo.value if call.excinfo is not None else None
    if report.failed and isinstance(error, pytest.fail.Exception) and not error.pytrace:
        report.longrepr = Message(error.msg)
