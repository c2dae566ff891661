"""The wordings of prompts, several per view."""

COPY = (
    "{code}\nSubmit the value of {name}.", "Given:\n{code}\nWhat is {name}? Submit it.",
    "{code}\nWhat value does {name} have?", "Look at these lines:\n{code}\nSubmit {name}.",
    "After\n{code}\nwhat is the value of {name}?",
)  # fmt: skip
EMIT = (
    "Write this to {path}:\n{code}", "Create the file {path} with this content:\n{code}",
    "Save these lines as {path}, then submit:\n{code}", "Put the following into {path}:\n{code}",
)  # fmt: skip
SUMS = (
    "What is {q}?", "Calculate {q}.", "Compute {q} and submit the result.", "How much is {q}?",
    "Work out {q}. Submit the number.",
)  # fmt: skip
PREDICT = (
    "{code}\nWhat does {call} return?", "Given\n{code}\nsubmit the value of {call}.",
    "{code}\nPredict {call}.", "Read this function:\n{code}\nWhat is {call}?",
)  # fmt: skip
COMPLETE = (
    "Replace the ? in {path} by the right operator.\n{code}\n{examples}",
    "{path} has a gap, marked ?. Fill it in.\n{code}\n{examples}",
    "Which operator belongs at the ? in {path}? Fix the line.\n{code}\n{examples}",
    "Complete {path}:\n{code}\nIt must hold that\n{examples}",
)
FIX = (
    "{name} in {path} is wrong: {call} should return {expected}. Fix it.",
    "There is a bug in {path}. {call} must be {expected}. Find the wrong line and correct it.",
    "Fix {name} in {path} so that it does what its docstring says. For example, {call} gives {expected}.",
    "{path} has one wrong line. Repair {name}; {call} should give {expected}.",
    "The code of {name} in {path} does not match its docstring. Make {call} return {expected}.",
    "Please fix {path}. I expected {call} to be {expected}.",
)
REPAIR = (
    "The tests fail. Find the bug in {path} and fix it.",
    "The tests in {test} fail. Fix {path}.",
    "Fix the failing test in {test}. The bug is in {path}.",
    "Make the tests pass. Do not change {test}; the bug is in {path}.",
    "There is a bug in {path} that makes {test} fail. Fix it.",
    "Something in {path} is broken: pytest reports a failure. Please repair it.",
    "pytest fails on {test}. Find the wrong line in {path} and correct it.",
    "Find and fix the bug in {path}.",
    "One function in {path} does not do what its docstring says. Fix it so that the tests pass.",
    "test_{name} fails. Fix {path}.",
)
BODY = (
    "Write the body of {name} in {path}. For example, {call} returns {expected}.",
    "Implement {name} in {path} as its docstring says. {call} should be {expected}.",
    "{name} in {path} is not written yet. Fill in the missing line, so that {call} gives {expected}.",
    "Complete the function {name} in {path}. Example: {call} is {expected}.",
    "Replace the placeholder in {path} by one line that does what the docstring of {name} says.",
    "Please implement {name} ({path}); its docstring tells what it does.",
)

CHOOSE = "{doc}\n{line}\nSubmit what ? is."

OPERATOR = (
    "One operator in {path} is wrong: {call} should return {expected}. Correct the line.",
    "{name} in {path} uses a wrong operator. {call} must be {expected}. Fix that one line.",
    "Find the wrong operator in {path} and replace it; {call} should give {expected}.",
    "One operator keeps {name} ({path}) from doing what its docstring says. Make {call} return {expected}.",
)
WRITE = (
    "Write the body of {name} in {path}, as its docstring says. {test} must pass.",
    "{name} in {path} is not written yet. Implement it; the check runs {test}.",
    "Implement {name} ({path}) so that {test} passes. Its docstring tells what it does.",
    "Replace the placeholder in {path} by the body of {name}. Then run {test}.",
)
TRACE = (
    "{test} fails. Fix {path}.\n{trace}",
    "This is what {test} says:\n{trace}\nRepair {path} until it passes.",
    "{path} is broken:\n{trace}\nThere may be more than one bug. Make {test} pass.",
    "After a bad edit of {path}, the check ends like this:\n{trace}\nFix every wrong line.",
)
MANY = (
    "{path} has {count} wrong line(s). Fix what is wrong and keep the rest as it is; {test} must pass.",
    "Some function of {path} does not do what its docstring says. Repair it without breaking the others.",
    "{test} fails. Find the bug(s) in {path}; all functions must do what their docstrings say.",
    "Repair {path}. Wrong lines: {count}. Every other function must keep its results.",
)
DEEP = (
    "{test} fails:\n{trace}\nThe bug is in one of the modules. Find it and fix it.",
    "Running {test} ends with\n{trace}\nRepair the module that is to blame.",
    "{trace}\nThat is what {test} prints. Correct the wrong line in its module.",
)
AMONG = (
    "{call} should return {expected}. Find the function and fix its one wrong line.",
    "{name} is wrong: {call} must be {expected}. It lives in one of these files. Repair it.",
    "Somewhere in these files {name} has a bug. {call} should give {expected}. Fix it; {test} must pass.",
    "A user reports that {call} is not {expected}. Find out which file is to blame and correct it.",
)
EXTEND = (
    "Give {name} in {path} a further parameter {new} with default {default}: {told} "
    "For example, {call} returns {expected}. Calls without it must return what they return now.",
    "Extend {name} ({path}) by a last parameter {new}={default}. {told} {call} should be {expected}; "
    "{test} must still pass.",
    "Add the parameter {new} to {name} in {path}, {default} if it is left out. {told} "
    "So {call} gives {expected}, and old calls do what they did.",
)
REFACTOR = (
    "{name} in {path} is right but clumsy. Write it with at most {bound}, without changing what it returns.",
    "Simplify {name} in {path}: at most {bound}. Its results must stay the same, and {test} must pass.",
    "Refactor {name} ({path}) to at most {bound}. It must return what it returns now.",
)
WRITE_TEST = (
    "Write {test}: assertions that pass on {path} and fail if one of these lines is changed so:\n{changes}",
    "{path} is right. Write tests in {test} that would notice each of these mistakes:\n{changes}",
    "Test {name} of {path} in {test}. The tests must pass, and fail after any of these changes:\n{changes}",
)
REPLACE = "{code}\nOne operator in {path} is wrong. Replace it."
