"""What is shown of trainings: panels while they run, and one page of HTML."""
