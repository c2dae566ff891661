"""The viewer of logs and trainings: in a browser, on a terminal, beside a server, or written as one file."""
