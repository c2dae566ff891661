"""The report of a training as one page of HTML: nothing is loaded from elsewhere and no script runs in it."""
