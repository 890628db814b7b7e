import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Module",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("path", models.CharField(help_text="From the library's root, with slashes.", max_length=255, unique=True)),
                ("name", models.CharField(max_length=255)),
                ("lines", models.PositiveIntegerField()),
                ("indexed_at", models.DateTimeField(auto_now=True)),
            ],
        ),
        migrations.CreateModel(
            name="Definition",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "kind",
                    models.CharField(
                        choices=[("module", "Module"), ("class", "Class"), ("function", "Function"), ("coroutine", "Coroutine")],
                        max_length=10,
                    ),
                ),
                ("name", models.TextField()),
                ("qualified_name", models.TextField()),
                ("line", models.PositiveIntegerField()),
                ("docstring", models.TextField(blank=True)),
                (
                    "module",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="definitions", to="example_project.module"
                    ),
                ),
            ],
        ),
    ]
