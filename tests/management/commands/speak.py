"""A management command for the tests."""

from django.core.management.base import BaseCommand, CommandError


class Command(BaseCommand):
    def add_arguments(self, parser):
        parser.add_argument("words", nargs="*")
        parser.add_argument("--times", type=int, default=1)
        parser.add_argument("--name")
        parser.add_argument("--fail", action="store_true")

    def handle(self, *args, words, times, name, fail, **options):
        if fail:
            raise CommandError("there was nothing to say")
        self.stderr.write("a warning")
        for _ in range(times):
            self.stdout.write(self.style.SUCCESS(" ".join([*words, *([name] if name else [])])))
