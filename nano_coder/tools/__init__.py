"""The tools an agent acts with: registered in one dictionary, one noun a file."""

from nano_coder.tools.calculate import calculate
from nano_coder.tools.calendar import cancel_event, create_event, list_events, move_event
from nano_coder.tools.contacts import find_contact, save_contact
from nano_coder.tools.edit_file import edit_file
from nano_coder.tools.lookup import lookup
from nano_coder.tools.mail import delete_mail, list_mail, read_mail, send_mail
from nano_coder.tools.python import python
from nano_coder.tools.read_file import read_file
from nano_coder.tools.search import search
from nano_coder.tools.shell import shell
from nano_coder.tools.sql import sql
from nano_coder.tools.submit import submit
from nano_coder.tools.tool import Tool, ToolContext, ToolFailure, ToolResult, tool
from nano_coder.tools.write_file import write_file

_CODING = (read_file, edit_file, write_file, search, shell, python, calculate, submit)
_WORKPLACE = (
    list_mail, read_mail, send_mail, delete_mail,
    list_events, create_event, move_event, cancel_event,
    find_contact, save_contact,
)  # fmt: skip

TOOLS: dict[str, Tool] = {t.spec.name: t for t in (*_CODING, lookup, sql, *_WORKPLACE)}

__all__ = ["TOOLS", "Tool", "ToolContext", "ToolFailure", "ToolResult", "tool"]
