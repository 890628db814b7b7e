"""On PostgreSQL, a function that enqueues a job: for triggers, and for other languages."""

from django.db import migrations
from django.db.models import NOT_PROVIDED

from django_dbqueue.models.keyed import OF_THE_CALL
from django_dbqueue.core.notify import CHANNEL

ARGUMENTS = "text, jsonb, jsonb, text, integer, timestamptz, text"
# What the function itself knows of a job; all other columns have the defaults of the model.
KNOWN = {
    "id": "new_id",
    "task": "dbqueue_enqueue.task",
    "queue": "dbqueue_enqueue.queue",
    "priority": "dbqueue_enqueue.priority",
    "state": "CASE WHEN due > moment THEN 'scheduled' ELSE 'ready' END",
    "args": "dbqueue_enqueue.args",
    "kwargs": "dbqueue_enqueue.kwargs",
    # The worker knows them: of the task, and of its queue in OPTIONS.
    "max_attempts": "0",
    "run_after": "due",
    "enqueued_at": "moment",
    "key": "dbqueue_enqueue.task || ' ' || dbqueue_enqueue.key",
}

# A number of thousands of digits, JSON of a hundred levels or a time beyond the year 9999 could be stored, and no worker
# could read the row: they are refused, as they are in Python.
FUNCTION = r"""
CREATE OR REPLACE FUNCTION {schema}.dbqueue_enqueue(
    task text,
    args jsonb DEFAULT '[]',
    kwargs jsonb DEFAULT '{{}}',
    queue text DEFAULT 'default',
    priority integer DEFAULT 0,
    run_after timestamptz DEFAULT NULL,
    key text DEFAULT NULL
) RETURNS uuid LANGUAGE plpgsql AS $function$
#variable_conflict use_column
DECLARE
    moment CONSTANT timestamptz := statement_timestamp();
    due CONSTANT timestamptz := coalesce(dbqueue_enqueue.run_after, moment);
    microseconds CONSTANT bigint := extract(epoch FROM clock_timestamp()) * 1000000;
    -- Version 7, RFC 9562: milliseconds, 12 bits of their fraction, and the random end of a version 4.
    new_id uuid := (
        lpad(to_hex(microseconds / 1000), 12, '0') || '7'
        || lpad(to_hex(microseconds % 1000 * 4096 / 1000), 3, '0')
        || substr(replace(gen_random_uuid()::text, '-', ''), 17)
    )::uuid;
    json jsonb;
    wrong text;
    hint text;
BEGIN
    dbqueue_enqueue.args := coalesce(dbqueue_enqueue.args, '[]');
    dbqueue_enqueue.kwargs := coalesce(dbqueue_enqueue.kwargs, '{{}}');
    dbqueue_enqueue.queue := coalesce(dbqueue_enqueue.queue, 'default');
    dbqueue_enqueue.priority := coalesce(dbqueue_enqueue.priority, 0);
    IF dbqueue_enqueue.task IS NULL OR dbqueue_enqueue.task !~ '^[^\s.]+(\.[^\s.]+)+$' OR length(dbqueue_enqueue.task) > 255 THEN
        wrong := format('task %L is not the path of a task.', left(dbqueue_enqueue.task, 300));
        hint := 'Give its module and its name, such as ''shop.tasks.confirm'', of at most 255 characters.';
    ELSIF jsonb_typeof(dbqueue_enqueue.args) <> 'array' THEN
        wrong := format('args must be a JSON array, not %s.', left(dbqueue_enqueue.args::text, 100));
        hint := 'Give jsonb_build_array(...), or arguments by name as kwargs.';
    ELSIF jsonb_typeof(dbqueue_enqueue.kwargs) <> 'object' THEN
        wrong := format('kwargs must be a JSON object, not %s.', left(dbqueue_enqueue.kwargs::text, 100));
        hint := 'Give jsonb_build_object(...).';
    ELSIF dbqueue_enqueue.queue !~ '^[^-*,\s][^*,]{{0,99}}$' THEN
        wrong := format('queue %L is not the name of a queue.', left(dbqueue_enqueue.queue, 150));
        hint := 'Give up to 100 characters without * and comma, the first neither - nor a space.';
    ELSIF dbqueue_enqueue.priority NOT BETWEEN -100 AND 100 THEN
        wrong := format('priority must be a whole number between -100 and 100, not %s.', dbqueue_enqueue.priority);
        hint := 'Higher runs first.';
    ELSIF NOT isfinite(due) OR due NOT BETWEEN timestamptz '0002-01-01' AND moment + interval '36500 days' THEN
        wrong := format('run_after must be a time within 36,500 days from now, not %s.', due);
        hint := 'Leave it out to run the job at once.';
    ELSIF length(dbqueue_enqueue.key) NOT BETWEEN 1 AND 200 THEN
        wrong := format('key must be text of 1 to 200 characters, not %s.', length(dbqueue_enqueue.key));
        hint := 'Leave it out for a job of its own, or give a shorter one, such as an id.';
    END IF;
    FOREACH json IN ARRAY ARRAY[dbqueue_enqueue.args, dbqueue_enqueue.kwargs] LOOP
        IF wrong IS NULL AND length(json::text) > 60
            AND jsonb_path_exists(json, 'strict $.**{{31 to last}} ? (@.type() == "array" || @.type() == "object")')
        THEN
            wrong := 'args and kwargs must not be nested more than 30 deep.';
            hint := 'Give flat values, such as ids.';
        ELSIF wrong IS NULL AND length(json::text) > 4000 AND EXISTS (
            SELECT FROM jsonb_path_query(json, 'strict $.** ? (@.type() == "number")') AS number WHERE length(number::text) > 4000
        ) THEN
            wrong := 'args and kwargs must not have numbers of over 4,000 digits.';
            hint := 'Give them as text.';
        END IF;
    END LOOP;
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = '22023', MESSAGE = 'dbqueue_enqueue: ' || wrong, HINT = hint;
    END IF;
    IF dbqueue_enqueue.key IS NULL THEN
        INSERT INTO {table} ({columns}) VALUES ({values});
    ELSE
        -- As Task.using(key=...), whose on_conflict is "rerun": the row that the key has gets what this call asks for.
        INSERT INTO {table} AS job ({columns}) VALUES ({values})
        ON CONFLICT (key) WHERE key IS NOT NULL DO UPDATE SET
            {of_the_call},
            run_after = CASE WHEN job.state IN ('scheduled', 'blocked', 'ready') THEN least(job.run_after, due) ELSE due END,
            asked_again = job.asked_again OR job.state = 'running',
            state = CASE
                WHEN job.state = 'running' THEN 'running'
                WHEN job.state IN ('scheduled', 'blocked', 'ready') AND least(job.run_after, due) <= moment THEN 'ready'
                WHEN due > moment THEN 'scheduled' ELSE 'ready' END,
            expires_at = NULL,
            blocked_by = NULL,
            failures = CASE WHEN job.state = 'running' THEN job.failures ELSE 0 END,
            attempts_before = CASE WHEN job.state = 'running' THEN job.attempts_before ELSE job.attempt END,
            enqueued_at = CASE WHEN job.finished_at IS NULL THEN job.enqueued_at ELSE moment END,
            started_at = CASE WHEN job.finished_at IS NULL THEN job.started_at END,
            result = CASE WHEN job.finished_at IS NULL THEN job.result END,
            stop_asked_at = CASE WHEN job.finished_at IS NULL THEN job.stop_asked_at END,
            finished_at = NULL
        RETURNING job.id INTO new_id;
    END IF;
    PERFORM pg_notify('{channel}', dbqueue_enqueue.queue || ',' || dbqueue_enqueue.priority);
    RETURN new_id;
END
$function$
"""


def create(apps, schema_editor):
    if schema_editor.connection.vendor != "postgresql":
        return
    job = apps.get_model("dbqueue", "Job")
    quote = schema_editor.quote_name
    schema = quote(_schema(schema_editor, job))
    values = {
        field.column: KNOWN.get(field.name) or _default(schema_editor, field)
        for field in job._meta.local_concrete_fields
        if field.name in KNOWN or field.default is not NOT_PROVIDED
    }
    of_the_call = [field.column for field in job._meta.local_concrete_fields if field.name in OF_THE_CALL]
    schema_editor.execute(
        FUNCTION.format(
            schema=schema,
            table=f"{schema}.{quote(job._meta.db_table)}",
            columns=", ".join(map(quote, values)),
            values=", ".join(values.values()),
            of_the_call=", ".join(f"{quote(column)} = excluded.{quote(column)}" for column in of_the_call),
            channel=CHANNEL,
        ),
        params=None,
    )


def drop(apps, schema_editor):
    if schema_editor.connection.vendor != "postgresql":
        return
    schema = schema_editor.quote_name(_schema(schema_editor, apps.get_model("dbqueue", "Job")))
    schema_editor.execute(f"DROP FUNCTION IF EXISTS {schema}.dbqueue_enqueue({ARGUMENTS})", params=None)


def _schema(schema_editor, model):
    """Where the table is: the function must find it whatever its caller's search_path is."""
    with schema_editor.connection.cursor() as cursor:
        table = schema_editor.quote_name(model._meta.db_table)
        cursor.execute(
            "SELECT nspname FROM pg_namespace JOIN pg_class ON relnamespace = pg_namespace.oid WHERE pg_class.oid = %s::regclass",
            [table],
        )
        return cursor.fetchone()[0]


def _default(schema_editor, field):
    value = field.get_db_prep_save(field.get_default(), schema_editor.connection)
    return str(schema_editor.quote_value(value))


class Migration(migrations.Migration):
    dependencies = [("dbqueue", "0001_initial")]

    operations = [migrations.RunPython(create, drop)]
