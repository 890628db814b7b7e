"""Execute stdin, one JSON line each, and answer each with its traceback, or an empty line."""

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
