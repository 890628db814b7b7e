"""Private: every statement that changes a job's state, apart from the operators' actions.

Functions over a database alias, one module for each step of a job's way.
"""
