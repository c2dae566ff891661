"""The report of a training: the live view, the sinks of its metrics, and one page of HTML."""
