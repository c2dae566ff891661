"""The wordings of prompts, several per view."""

COPY = (
    "{code}\nSubmit the value of {name}.",
    "Given:\n{code}\nWhat is {name}? Submit it.",
    "{code}\nWhat value does {name} have?",
    "Look at these lines:\n{code}\nSubmit {name}.",
    "After\n{code}\nwhat is the value of {name}?",
)
EMIT = (
    "Write this to {path}:\n{code}",
    "Create the file {path} with this content:\n{code}",
    "Save these lines as {path}, then submit:\n{code}",
    "Put the following into {path}:\n{code}",
)
SUMS = (
    "What is {q}?",
    "Calculate {q}.",
    "Compute {q} and submit the result.",
    "How much is {q}?",
    "Work out {q}. Submit the number.",
)
PREDICT = (
    "{code}\nWhat does {call} return?",
    "Given\n{code}\nsubmit the value of {call}.",
    "{code}\nPredict {call}.",
    "Read this function:\n{code}\nWhat is {call}?",
)
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

WRITE = (
    "Write the body of {name} in {path}, as its docstring says. {test} must pass.",
    "{name} in {path} is not written yet. Implement it; the check runs {test}.",
    "Implement {name} ({path}) so that {test} passes. Its docstring tells what it does.",
    "Replace the placeholder in {path} by the body of {name}. Then run {test}.",
)
REPLACE = "{code}\nOne operator in {path} is wrong. Replace it."
