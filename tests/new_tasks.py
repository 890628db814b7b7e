"""Of the next release: workers know it that are told so."""

from django_dbqueue import task


@task
def greet(name):
    return f"hello, {name}"
