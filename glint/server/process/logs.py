"""The log on standard error: lines of text, or with --log-json one JSON object per line."""

import asyncio
import io
import logging
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

from glint.errors import GlintError
from glint.server.outcomes import RequestOutcome, escape

TEXT_FORM = "%(asctime)s %(levelname)s %(name)s %(message)s"


def set_up_logging(level: str, as_json: bool) -> None:
    """Send all logs to standard error. With JSON, everything else that Python prints there becomes objects as well."""
    logging.basicConfig(level=level.upper(), handlers=[make_handler(as_json)])
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(is_no_cancellation)
    if as_json:
        logging.raiseExceptions = False
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_thread
        sys.stderr = LoggedLines()


def make_handler(as_json: bool) -> logging.Handler:
    """A handler that writes records to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter(TEXT_FORM))
    return handler


def log_refusal(problem: GlintError) -> None:
    """Log why the server cannot start."""
    logging.getLogger("glint").error("%s", problem)


def is_no_cancellation(record: logging.LogRecord) -> bool:
    """Whether a record is not just about a cancelled task: the request of that task has its outcome line."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


class JsonFormatter(logging.Formatter):
    """One object per record: time, level, logger, and the fields of an outcome or the message and its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record on one line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if isinstance(record.msg, RequestOutcome):
            return escape(head | record.msg.as_dict())
        body = {"message": record.getMessage()}
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return escape(head | body)


class LoggedLines(io.TextIOBase, TextIO):
    """A standard error whose text goes to the log: one record per call of `write`, without its last line break."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("stderr")
        self._begun = ""

    def write(self, text: str) -> int:
        """Log the text once it ends with a line."""
        self._begun += text
        if self._begun.endswith("\n"):
            complete, self._begun = self._begun.strip("\n"), ""
            if complete:
                self._logger.warning("%s", complete)
        return len(text)

    def fileno(self) -> int:
        """The file of standard error."""
        return 2

    def isatty(self) -> bool:
        """False: nobody draws progress bars here."""
        return False


def _log_uncaught(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("glint").critical("uncaught: %s", problem, exc_info=(kind, problem, trace))


def _log_thread(details: threading.ExceptHookArgs) -> None:
    if details.exc_value is not None:
        _log_uncaught(details.exc_type, details.exc_value, details.exc_traceback)
