"""A text of tool calls: questions about Python's library, calls with arguments in JSON, and what they return.

What is asked, called and returned comes from the library's own signatures and documentation, in a fixed order.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from typing import Any

from kvfold.evaluation.text import Text

MODULES = (
    "argparse asyncio bisect calendar collections configparser contextlib csv datetime decimal difflib email.message fractions "
    "functools hashlib heapq html http.client http.cookiejar imaplib inspect ipaddress itertools json logging mailbox math "
    "operator os pathlib pickle pprint random re sched shutil smtplib socket sqlite3 statistics string subprocess tarfile "
    "tempfile textwrap threading timeit traceback typing unittest urllib.parse urllib.request uuid weakref zipfile"
).split()
"""Those that are there are gone through, name by name."""
ADDRESS = " at 0x"
"""Of objects, in signatures: another in every process."""


def tool_calls() -> Text:
    """JSON lines, three for each public name of the modules: a question, a call, and its result."""
    lines = []
    for number, (name, thing) in enumerate(_documented()):
        signature, doc = _signature(thing), inspect.getdoc(thing) or ""
        call = {"name": "describe", "arguments": {"qualified_name": name, "kind": _kind(thing), "with_signature": True}}
        result = {
            "qualified_name": name,
            "signature": signature,
            "summary": doc.partition("\n\n")[0],
            "characters": len(doc),
        }
        lines += [
            {"role": "user", "content": f"How do I call {name}, and what does it do?"},
            {"role": "assistant", "tool_calls": [{"id": f"call_{number:04}", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": f"call_{number:04}", "content": result},
        ]
    return Text("".join(json.dumps(line) + "\n" for line in lines), "signatures of python's standard library")


def _documented() -> Iterator[tuple[str, Any]]:
    for module in MODULES:
        try:
            found = importlib.import_module(module)
        except ImportError:  # a Python that was built without it
            continue
        for name in sorted(getattr(found, "__all__", None) or vars(found)):
            thing = getattr(found, name, None)
            if name.startswith("_") or not callable(thing) or not inspect.getdoc(thing):
                continue
            yield f"{module}.{name}", thing
            if inspect.isclass(thing):
                for method in sorted(vars(thing)):
                    if not method.startswith("_") and inspect.isfunction(vars(thing)[method]):
                        yield f"{module}.{name}.{method}", vars(thing)[method]


def _signature(thing: Any) -> str:
    try:
        found = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return "(...)"
    return "(...)" if ADDRESS in found else found


def _kind(thing: Any) -> str:
    return "class" if inspect.isclass(thing) else "function"
