"""Runs what stdin says, a line of JSON each, and answers each with a line: the error that it raised, or nothing."""

import json
import sys
import traceback

import django


def main():
    django.setup()
    from django.core.management import call_command

    from . import tasks

    names = {**vars(tasks), "call_command": call_command}
    for line in sys.stdin:
        error = ""
        try:
            exec(json.loads(line), names)
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
