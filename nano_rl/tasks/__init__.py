"""Procedural coding tasks: typed programs, their mutants, and the task views over them."""
