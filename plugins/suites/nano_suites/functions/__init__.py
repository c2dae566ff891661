"""Generated Python functions, their mutants, and the task views over them."""
