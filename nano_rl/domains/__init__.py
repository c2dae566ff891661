"""Domains beyond Python functions, each a suite of families: shell, SQL, data, logic, workplace, and more."""
