from django.db import OperationalError

from django_dbqueue import task

from . import library
from .models import Module
from .parsing import definitions


@task(queue_name="index", max_attempts=3, retry_on=(OperationalError,))
def index_file(path: str) -> int:
    """Store what a file of the standard library defines; again, it replaces that. Returns how many definitions it has.

    A file that is not Python fails at once: only the database's troubles pass.
    """
    source = library.read(path)
    name = library.module_name(path)
    return Module.objects.store(path, name, source.count("\n"), definitions(source, name))
