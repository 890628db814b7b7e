"""A month of a busy queue in trouble, in all tables. PostgreSQL only.

Of a million jobs, more are ready, scheduled, blocked and failed than a list reads at most. One
queue and one task are rare: their five jobs are the oldest.
"""

from __future__ import annotations

from django.db import connection

# Numbers of rows that do not depend on the number of jobs, and the number of jobs for each row of others.
FIXED = {
    "queues": 50,
    "tasks": 40,
    "processes": 20,
    "recurring": 20,
    "releases": 3,
    "running": 200,
    "failures": 500,
    "operations": 1000,
}
JOBS_PER = {"batches": 200, "limits": 200}
# The time and the id of each job, by its number. They stay the same from one statement to the next.
FUNCTIONS = """
CREATE OR REPLACE FUNCTION pg_temp.time_of(n bigint) RETURNS timestamptz STABLE LANGUAGE sql AS
    $$ SELECT timestamptz '{now}' - interval '30 days' * ({jobs} - n) / {jobs} $$;
CREATE OR REPLACE FUNCTION pg_temp.id_of(n bigint) RETURNS uuid STABLE LANGUAGE sql AS
    $$ SELECT (lpad(to_hex((extract(epoch FROM pg_temp.time_of(n)) * 1000)::bigint), 12, '0')
        || '7' || substr(md5(n::text), 1, 3) || '8' || substr(md5(n::text), 4, 15))::uuid $$;
"""

JOBS = """
INSERT INTO dbqueue_job (
    id, task, queue, priority, args, kwargs, metadata, max_attempts, on_lost, key, limits, source,
    batch_id, enqueued_at, run_after, state, attempt, failures, has_begun, rerun_requested,
    attempts_before, blocked_by, started_at, finished_at, process_id
)
SELECT
    pg_temp.id_of(n), task, CASE WHEN n <= 5 THEN 'rare' ELSE 'queue_' || n % {queues} END, n % 3,
    '[]', jsonb_build_object('customer', n), jsonb_build_object('request', n % 1000), 3, 'retry',
    CASE WHEN n % 50 = 0 THEN task || ' key_' || n END,
    CASE WHEN n % 10 = 3 THEN '[{{"key": "saturated", "max_running": 2}}]'::jsonb END,
    CASE WHEN n % 4 = 0 THEN jsonb_build_object('command', 'import_' || n % 10) END,
    CASE WHEN n % 4 = 1 THEN pg_temp.id_of(n / {per_batch} * {per_batch}) END,
    at, CASE state WHEN 'scheduled' THEN now() + interval '1 minute' * (n % 10000 + 10) ELSE at END,
    state, attempt, CASE state WHEN 'failed' THEN 2 WHEN 'successful' THEN attempt - 1 ELSE 0 END,
    attempt > 0, false, 0,
    CASE state WHEN 'blocked' THEN CASE WHEN n % 2 = 0 THEN 'saturated' ELSE 'limit ' || n % 20 END END,
    CASE WHEN attempt > 0 THEN at + interval '1 second' END,
    CASE WHEN state IN ('successful', 'failed', 'discarded') THEN at + interval '2 seconds' END,
    CASE state WHEN 'running' THEN 1 + n % {processes} END
FROM (
    SELECT n, at, state, CASE WHEN n <= 5 THEN 'shop.tasks.rare' ELSE 'shop.tasks.task_' || n / 7 % {tasks} END AS task,
        CASE state WHEN 'running' THEN 1 WHEN 'failed' THEN 2
            WHEN 'successful' THEN CASE WHEN share % 5 = 0 THEN 2 ELSE 1 END ELSE 0 END AS attempt
    FROM (
        SELECT n, share, pg_temp.time_of(n) AS at, CASE
            WHEN n % ({jobs} / {running}) = 0 THEN 'running'
            WHEN n <= 5 OR share < 45 THEN 'successful' WHEN share < 60 THEN 'failed'
            WHEN share < 63 THEN 'discarded' WHEN share < 76 THEN 'ready'
            WHEN share < 88 THEN 'scheduled' ELSE 'blocked' END AS state
        FROM (SELECT n, n * 7919 % 10007 % 100 AS share FROM generate_series(1, {jobs}::bigint) AS n) AS numbered
    ) AS stated
) AS tried
"""

# Each failed attempt is of one of the failures: half of them are of the first.
EXECUTIONS = """
INSERT INTO dbqueue_execution (
    job_id, attempt, outcome, process, release, claimed_at, started_at, finished_at, error_type,
    message, traceback, log, failure_id
)
SELECT job.id, number, CASE WHEN has_failed THEN 'failed' ELSE 'successful' END, 'worker@host:' || nth % {processes},
    'release_' || nth % {releases}, enqueued_at, enqueued_at + interval '1 second', enqueued_at + interval '2 seconds',
    CASE WHEN has_failed THEN 'shop.errors.Error' || failure % 30 ELSE '' END, CASE WHEN has_failed THEN 'No such customer' ELSE '' END,
    CASE WHEN has_failed THEN 'Traceback' ELSE '' END, '', CASE WHEN has_failed THEN failure END
FROM (
    SELECT *, CASE WHEN nth % 2 = 0 THEN 1 ELSE 1 + nth % {failures} END AS failure
    FROM (SELECT *, (kwargs ->> 'customer')::bigint AS nth FROM dbqueue_job WHERE state IN ('successful', 'failed')) AS ended
) AS job, LATERAL (SELECT number, number <= job.failures AS has_failed FROM generate_series(1, job.attempt) AS number) AS attempts
ORDER BY job.id
"""

OTHERS = """
INSERT INTO dbqueue_queue (name) SELECT 'queue_' || n FROM generate_series(0, {queues} - 1) AS n UNION ALL SELECT 'rare';
INSERT INTO dbqueue_taskstate (name) SELECT 'shop.tasks.task_' || n FROM generate_series(0, {tasks} - 1) AS n UNION ALL SELECT 'shop.tasks.rare';
INSERT INTO dbqueue_process (id, name, kind, hostname, pid, release, details, expires_at)
SELECT 1 + n, 'worker@host:' || n, CASE WHEN n % 10 = 9 THEN 'dispatcher' ELSE 'worker' END, 'host', n,
    'release_' || n % {releases}, '{{"queues": "*", "threads": 20}}', now() + interval '1 hour'
FROM generate_series(0, {processes} - 1) AS n;
INSERT INTO dbqueue_batch (id, description, created_at, sealed_at, finished_at, on_finish)
SELECT pg_temp.id_of(n * {per_batch}), 'Batch ' || n, pg_temp.time_of(n), now(), CASE WHEN n % 2 = 0 THEN now() END,
    '{{"task": "shop.tasks.task_1", "queue": "queue_1"}}'
FROM generate_series(0, {batches}::bigint) AS n;
INSERT INTO dbqueue_semaphore (key, max_running, burst) SELECT 'limit ' || n, 2, 1 FROM generate_series(0, {limits}) AS n UNION ALL SELECT 'saturated', 2, 1;
INSERT INTO dbqueue_slot (semaphore_id, job_id, attempt, slot_group, max_running)
SELECT CASE nth % 2 WHEN 0 THEN 'saturated' ELSE 'limit ' || nth % 20 END, id, attempt, id, 2 FROM (SELECT *, row_number() OVER () AS nth FROM dbqueue_job WHERE state = 'running') AS running;
INSERT INTO dbqueue_failure (id, fingerprint, error_type, message, location, state, count, last_seen, first_seen)
SELECT n, md5(n::text), 'shop.errors.Error' || n % 30, 'No such customer', 'shop/tasks.py:task', CASE n % 5 WHEN 4 THEN 'resolved' WHEN 3 THEN 'muted' ELSE 'open' END,
    10, now() - interval '1 hour' * (n % 700), now() - interval '30 days'
FROM generate_series(1, {failures}) AS n;
INSERT INTO dbqueue_failurestatistic (failure_id, period, start, queue, task, release, number)
SELECT n, 'hour', date_trunc('hour', now()) - interval '1 hour' * h, 'queue_1', 'shop.tasks.task_1', 'release_1', 3
FROM generate_series(1, {failures}) AS n, generate_series(0, 23) AS h;
INSERT INTO dbqueue_statistic (period, start, queue, task, release, enqueued, runs, failures)
SELECT 'hour', date_trunc('hour', now()) - interval '1 hour' * h, 'queue_' || n, 'shop.tasks.task_' || n % {tasks}, 'release_1', 10, 9, 1
FROM generate_series(0, {queues} - 1) AS n, generate_series(0, 719) AS h;
INSERT INTO dbqueue_statistic (period, start, queue, task, release, enqueued, runs, failures)
SELECT 'minute', date_trunc('minute', now()) - interval '1 minute' * m, 'queue_' || n, 'shop.tasks.task_' || n % {tasks}, 'release_1', 10, 9, 1
FROM generate_series(0, {queues} - 1) AS n, generate_series(0, 359) AS m;
INSERT INTO dbqueue_recurringtask (name, task, every, next_run_at, last_run_at, is_from_code)
SELECT 'recurring ' || n, 'shop.tasks.task_' || n, interval '10 minutes', now() + interval '1 minute' * n, now(), n % 2 = 0
FROM generate_series(1, {recurring}) AS n;
INSERT INTO dbqueue_recurringexecution (task_id, run_at, job)
SELECT task.id, now() - interval '1 minute' * n, pg_temp.id_of({jobs} - n * {recurring} - task.id % {recurring})
FROM dbqueue_recurringtask AS task, generate_series(1, {jobs} / 500) AS n;
INSERT INTO dbqueue_operation (verb, value, scope, reason, actor, total, done, changed, position, problem, created_at, finished_at)
SELECT 'retry', '', 'state=failed', 'A deploy', 'root', 20, 20, 20, 20, '', now(), CASE WHEN n % 10 > 0 THEN now() END
FROM generate_series(1, {operations}) AS n;
INSERT INTO dbqueue_operationjob (operation_id, job, changed, state, queue, priority, attempt, failures)
SELECT operation.id, pg_temp.id_of({jobs} - n - operation.id % 1000), true, 'failed', 'queue_1', 0, 1, 1
FROM dbqueue_operation AS operation, generate_series(1, 20) AS n;
INSERT INTO dbqueue_stacktrace (job_id, attempt, text) SELECT id, attempt, 'File "shop/tasks.py", line 3, in task' FROM dbqueue_job WHERE state = 'running' LIMIT 20;
INSERT INTO dbqueue_progress (job_id, attempt, done, total, note) SELECT id, attempt, 5, 10, 'half' FROM dbqueue_job WHERE state = 'running' LIMIT 100;
"""


def fill(jobs: int) -> None:
    """Insert this number of jobs with the rows of all other tables, and update the planner's statistics."""
    numbers: dict[str, object] = {**FIXED, "jobs": jobs, "per_batch": JOBS_PER["batches"]}
    numbers |= {name: jobs // each for name, each in JOBS_PER.items()}
    with connection.cursor() as cursor:
        cursor.execute("SELECT now()")
        numbers["now"] = cursor.fetchone()[0].isoformat()
        for statements in (FUNCTIONS, JOBS, EXECUTIONS, OTHERS):
            cursor.execute(statements.format(**numbers))
        cursor.execute("VACUUM (ANALYZE, SKIP_LOCKED)")
