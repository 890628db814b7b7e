"""Metrics for Prometheus: the collector, the view, ``--metrics-port``, the alerts and the dashboard."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from datetime import timedelta
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

import pytest
from django.contrib.auth.models import Permission, User
from django.db import OperationalError
from django.test import RequestFactory
from django.utils import timezone
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from django_dbqueue.contrib import prometheus
from django_dbqueue.contrib.prometheus import QueueCollector, metrics_view
from django_dbqueue.core.counts import BOUNDS, Counts, Times
from django_dbqueue.models import Failure, Job, Process, Queue, RecurringTask, Statistic
from django_dbqueue.models.expressions import now_plus
from django_dbqueue.models.statistic import Period, start_of
from django_dbqueue.testing import drain

from . import tasks
from .conftest import LONG, a_process, log_of, until
from .ports import free_port
from .servers import find

DOCS = Path(__file__).parent.parent / "docs"
ALERTS, DASHBOARD = DOCS / "prometheus" / "alerts.yml", DOCS / "prometheus" / "dashboard.json"

pytestmark = pytest.mark.django_db(databases=["default", "other"])


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Return the values by name and labels, in the order of the labels' names, but the database."""
    return {
        (each.name, *(v for name, v in each.labels.items() if name != "database")): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if each.labels.get("database", "default") == "default"
    }


def read(*aliases: str, **options: float) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    registry.register(QueueCollector(aliases or ["default"], **options))
    return samples(generate_latest(registry).decode())


def a_statistic(**values: object) -> Statistic:
    given = {"queue": "mail", "task": "shop.tasks.send", "period": Period.HOUR}
    given |= {"start": start_of(Period.HOUR, timezone.now()), **values}
    return Statistic.objects.create(**given)


class TestCollector:
    def test_jobs_are_counted_by_queue_and_state(self):
        tasks.fail.using(queue_name="reports").enqueue()
        drain()
        for _ in range(2):
            tasks.nothing.using(queue_name="mail").enqueue()
        tasks.nothing.using(queue_name="mail", run_after=timedelta(hours=1)).enqueue()
        Job.objects.filter(queue="mail", state="ready").update(run_after=now_plus(-90))

        found = read()

        assert found["dbqueue_up",] == 1
        assert found["dbqueue_jobs", "mail", "ready"] == 2
        assert found["dbqueue_jobs", "mail", "scheduled"] == 1
        assert found["dbqueue_jobs", "mail", "failed"] == 0
        assert found["dbqueue_jobs", "reports", "failed"] == 1
        assert 90 <= found["dbqueue_oldest_ready_job_age_seconds", "mail"] < 150
        assert found["dbqueue_oldest_ready_job_age_seconds", "reports"] == 0
        assert found["dbqueue_open_failures",] == Failure.objects.count() == 1

    def test_paused_queue_and_its_workers_are_shown(self):
        Queue.objects.named("mail", "reports").filter(name="mail").pause()
        a_process("worker@a:1:x", details={"queues": "mail", "threads": 8}, memory=1000)
        a_process("worker@a:2:x", details={"queues": "*", "threads": 4}, memory=500)
        a_process("worker@a:3:x", details={"queues": "*", "threads": 4}, expires_at=now_plus(-1))

        found = read()

        assert found["dbqueue_queue_paused", "mail"] == 1
        assert found["dbqueue_queue_paused", "reports"] == 0
        assert found["dbqueue_queue_workers", "mail"] == 2
        assert found["dbqueue_queue_workers", "reports"] == 1
        assert found["dbqueue_processes", "worker"] == 2
        assert found["dbqueue_processes", "dispatcher"] == 0
        assert found["dbqueue_worker_threads",] == 12
        assert found["dbqueue_processes_resident_memory_bytes", "worker"] == 1500

    def test_counts_of_today_are_counters_and_histograms(self):
        times = [0.004, 0.005, 0.0051, 0.4, 70.0, 9000.0]
        counts = Counts(
            enqueued=7, runs=6, failures=2, retries=1, run_time=Times.of(times), wait_time=Times()
        )
        row = a_statistic()
        row.counts = counts
        row.save()
        earlier = a_statistic(start=row.start - timedelta(days=1))
        earlier.counts = counts
        earlier.save()

        found = read()

        of = ("mail", "shop.tasks.send")
        assert found[("dbqueue_jobs_enqueued_total", *of)] == 7
        assert found[("dbqueue_attempts_total", "succeeded", *of)] == 4
        assert found[("dbqueue_attempts_total", "failed", *of)] == 2
        assert found[("dbqueue_retries_total", *of)] == 1
        buckets = {
            float(key[1]): value
            for key, value in found.items()
            if key[0] == "dbqueue_attempt_duration_seconds_bucket"
        }
        # A time in a bucket of the statistics that ends between two of these is in the longer one.
        assert [buckets[each] for each in (0.005, 0.01, 0.2, 0.5, 50, 100, 5000)] == [
            *(2, 3, 3, 4, 4, 5, 5)
        ]
        assert buckets[float("inf")] == 6
        assert sorted(buckets.values()) == [buckets[each] for each in sorted(buckets)]
        assert found[("dbqueue_attempt_duration_seconds_sum", *of)] == sum(times)
        assert found[("dbqueue_attempt_duration_seconds_count", *of)] == 6
        assert found[("dbqueue_attempt_wait_seconds_count", *of)] == 0

    def test_each_bucket_is_one_of_the_statistics(self):
        assert {*prometheus.BUCKETS} < {*BOUNDS}
        assert [f"{each:g}" for each in prometheus.BUCKETS[:5]] == [
            "0.005",
            "0.01",
            "0.02",
            "0.05",
            "0.1",
        ]

    def test_number_of_series_is_bounded_and_nothing_is_left_out(self):
        for queue in ("a", "b", "c", "d"):
            tasks.nothing.using(queue_name=queue).enqueue()
            row = a_statistic(queue=queue)
            row.counts = Counts(enqueued=10)
            row.save()

        found = read(most=2)

        assert {key[1] for key in found if key[0] == "dbqueue_jobs"} == {"a", "b", "(others)"}
        assert found["dbqueue_jobs", "(others)", "ready"] == 2
        assert found["dbqueue_oldest_ready_job_age_seconds", "(others)"] > 0
        assert found["dbqueue_jobs_enqueued_total", "b", "shop.tasks.send"] == 10
        assert found["dbqueue_jobs_enqueued_total", "(others)", "(others)"] == 20
        assert ("dbqueue_queue_workers", "(others)") not in found

    def test_overdue_recurring_tasks_are_counted(self):
        RecurringTask.objects.bulk_create(
            RecurringTask(
                name=f"after {hours} h",
                task="tests.tasks.nothing",
                every=timedelta(days=1),
                next_run_at=now_plus(3600 * hours),
            )
            for hours in (-2, -1, 1)
        )

        assert read()["dbqueue_overdue_recurring_tasks",] == 2

    def test_problems_have_their_check_and_severity(self):
        assert read()["dbqueue_problems", "processes", "critical"] == 1

    def test_problems_are_examined_less_often_than_the_rest(self, monkeypatch):
        ran = []
        monkeypatch.setattr(prometheus, "examine", lambda database: ran.append(1) or ())
        collector = QueueCollector(["default"], cached=0.0)
        for _ in range(3):
            collector.collect()

        assert len(ran) == 1

    def test_metrics_are_kept_for_a_moment(self, django_assert_num_queries):
        collector = QueueCollector(["default"])
        collector.collect()
        with django_assert_num_queries(0):
            collector.collect()

    def test_unreadable_database_is_down_and_reported(self, monkeypatch, caplog):
        def refuse(*args: object) -> None:
            raise OperationalError("the disk is full")

        monkeypatch.setattr(Job.objects._queryset_class, "lanes", refuse)

        found = read()

        assert found["dbqueue_up",] == 0
        assert not any(key[0] == "dbqueue_jobs" for key in found)
        assert "metrics: default could not be read: the disk is full" in caplog.text

    def test_outage_is_not_reported_at_each_scrape(self, monkeypatch, caplog):
        def refuse(*args: object) -> None:
            raise OperationalError("the disk is full")

        caplog.set_level("INFO", "django_dbqueue")
        collector = QueueCollector(["default"], cached=0.0)
        with monkeypatch.context() as patch:
            patch.setattr(Job.objects._queryset_class, "lanes", refuse)
            for _ in range(5):
                collector.collect()
        collector.collect()

        assert caplog.text.count("could not be read: the disk is full") == 1
        assert caplog.text.count("could not be read (resolved after") == 1

    def test_database_that_does_not_answer_holds_no_second_thread(self, monkeypatch):
        monkeypatch.setattr(prometheus, "PATIENCE", 0.1)
        collector = QueueCollector(["default"])
        collector._lock.acquire()

        (up,) = collector.collect()

        assert [each.value for each in up.samples] == [0]

    def test_invalid_options_do_not_keep_urls_from_loading(self, settings):
        wrong = {**settings.TASKS["default"], "OPTIONS": {"redy_within": 5}}
        settings.TASKS = {"default": wrong}

        metrics_view()

    def test_all_backends_are_read_by_default(self):
        tasks.nothing.using(backend="other", queue_name="mail").enqueue()
        registry = CollectorRegistry()
        registry.register(QueueCollector())

        text = generate_latest(registry).decode()

        assert 'dbqueue_up{database="default"} 1.0' in text
        assert 'dbqueue_jobs{database="other",queue="mail",state="ready"} 1.0' in text

    @pytest.mark.parametrize("alias", ["nowhere", "dummy"])
    def test_other_backends_are_refused(self, settings, alias):
        module = tasks.nothing.get_backend().__class__.__mro__[1].__module__.removesuffix(".base")
        dummy = {"BACKEND": f"{module}.dummy.DummyBackend"}
        settings.TASKS = {**settings.TASKS, "dummy": dummy}

        with pytest.raises(Exception, match=alias):
            QueueCollector([alias])


class TestView:
    @pytest.fixture
    def get(self):
        def get(view, user=None, **headers: str):
            request = RequestFactory().get("/metrics", headers=headers)
            request.user = user or User()
            return view(request)

        return get

    def test_bearer_of_the_token_may_read(self, get):
        view = metrics_view(token="s3cret")

        answer = get(view, authorization="Bearer s3cret")

        assert answer.status_code == 200
        assert answer["Content-Type"].startswith("text/plain")
        assert b'dbqueue_up{database="default"} 1.0' in answer.content

    @pytest.mark.parametrize(
        "given", ["", "Bearer", "Bearer ", "Bearer other", "Basic s3cret", "s3cret", "Bearer \xe9"]
    )
    def test_others_are_refused(self, get, given):
        answer = get(metrics_view(token="s3cret"), authorization=given)

        assert (answer.status_code, answer["WWW-Authenticate"]) == (401, "Bearer")
        assert b"dbqueue_up" not in answer.content

    def test_without_a_token_only_staff_with_the_permission_may_read(self, get):
        view = metrics_view()
        staff = User.objects.create(username="staff", is_staff=True)
        assert get(view, authorization="Bearer ").status_code == 403
        assert get(view, staff).status_code == 403

        staff.user_permissions.add(Permission.objects.get(codename="view_job"))

        assert get(view, User.objects.get()).status_code == 200
        User.objects.update(is_staff=False)
        assert get(view, User.objects.get()).status_code == 403

    @pytest.mark.parametrize("token", ["", "  "])
    def test_empty_token_is_refused(self, token):
        with pytest.raises(ValueError, match=r"is empty\. Give a secret"):
            metrics_view(token=token)

    def test_openmetrics_is_written_if_asked_for(self, get):
        answer = get(
            metrics_view(token="x"),
            authorization="bearer x",
            accept="application/openmetrics-text; version=1.0.0",
        )

        assert answer["Content-Type"].startswith("application/openmetrics-text")
        assert answer.content.endswith(b"# EOF\n")


def fetch(port: int, path: str = "/metrics") -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=LONG) as answer:
            return str(answer.read().decode())
    except urllib.error.URLError:
        return ""


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestServer:
    def test_runqueue_serves_metrics_and_counts_exits(self, runqueue):
        port = free_port()
        runqueue("--metrics-port", str(port))
        until(lambda: Process.objects.filter(kind="worker").exists() and fetch(port))
        result = tasks.nothing.enqueue()
        result.wait(LONG)
        done = ("dbqueue_attempts_total", "succeeded", "default", "tests.tasks.nothing")
        found = until(lambda: (all_ := samples(fetch(port))).get(done) and all_)
        assert found[done] == 1
        assert found["dbqueue_child_exits_total", "worker"] == 0

        subprocess.run(["kill", "-9", str(Process.objects.get(kind="worker").pid)], check=True)

        until(lambda: samples(fetch(port)).get(("dbqueue_child_exits_total", "worker")) == 1)

    def test_workers_measure_themselves_and_counts_outlive_them(self, runqueue):
        port = free_port()
        runqueue("--metrics-port", str(port), "--threads", "2")

        def worker(name: str, *labels: str) -> float | None:
            return samples(fetch(port)).get((f"dbqueue_worker_{name}", "default", *labels))

        tasks.add.enqueue_many([(number,) for number in range(50)])
        running = tasks.sleep.enqueue(5)
        until(lambda: worker("settled_jobs_total") == 50 and worker("running_jobs") == 1)
        assert worker("claimed_jobs_total") == 51
        assert 1 <= worker("claims_total", "yes") <= 51
        assert 1 <= worker("settles_total") <= 50
        assert 1 <= worker("active_threads") <= 2
        until(lambda: worker("claims_total", "no") > 0)
        until(lambda: worker("poll_delay_seconds") > 0)
        until(lambda: worker("unsettled_jobs") == 0)

        subprocess.run(["kill", "-9", str(Process.objects.get(kind="worker").pid)], check=True)

        until(lambda: running.refresh() or running.is_finished)
        until(lambda: worker("settled_jobs_total") == 51)
        assert worker("claimed_jobs_total") == 52
        program = [find("promtool"), "check", "metrics"]
        done = subprocess.run(program, input=fetch(port), capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout

    def test_port_in_use_is_refused_with_its_address(self, runqueue):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            child = runqueue("--metrics-port", str(port))
            assert child.wait(LONG) == 1

        assert f"--metrics-port: 127.0.0.1:{port} cannot be used" in log_of(child)
        assert "Traceback" not in log_of(child)

    @pytest.mark.parametrize("given", ["0", "65536", "http", "localhost:", ":"])
    def test_bad_port_is_refused(self, runqueue, given):
        child = runqueue("--metrics-port", given)

        assert child.wait(LONG) != 0
        assert f"{given!r} is not a port, nor an address and a port" in log_of(child)


class TestAlertsAndDashboard:
    def test_metrics_pass_the_linter(self):
        registry = CollectorRegistry()
        registry.register(QueueCollector(["default"]))
        done = subprocess.run(
            [find("promtool"), "check", "metrics"],
            input=generate_latest(registry),
            capture_output=True,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")

    def test_alerts_fire_when_they_should(self):
        command = [find("promtool"), "test", "rules", "alerts_test.yml"]
        done = subprocess.run(
            command, cwd=Path(__file__).parent / "prometheus", capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def test_each_alert_is_tested(self):
        tests = (Path(__file__).parent / "prometheus" / "alerts_test.yml").read_text()
        names = re.findall(r"- alert: (\w+)", ALERTS.read_text())
        assert {*re.findall(r"alertname: (\w+)", tests)} == {*names}

    @pytest.mark.django_db(transaction=True)
    def test_prometheus_loads_the_alerts_and_answers_the_dashboard(self, runqueue, tmp_path):
        program, port, web = find("prometheus"), free_port(), free_port()
        runqueue("--metrics-port", str(port))
        config = {
            "rule_files": [str(ALERTS)],
            "scrape_configs": [
                {
                    "job_name": "queue",
                    "scrape_interval": "1s",
                    "static_configs": [{"targets": [f"127.0.0.1:{port}"]}],
                }
            ],
        }
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))
        for _ in range(3):
            tasks.nothing.enqueue().wait(LONG)
        server = subprocess.Popen(
            [
                program,
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/data",
                f"--web.listen-address=127.0.0.1:{web}",
            ],
            stderr=subprocess.DEVNULL,
        )
        try:

            def ask(query: str) -> list:
                given = urlencode({"query": query})
                answer = fetch(web, f"/api/v1/query?{given}")
                return json.loads(answer)["data"]["result"] if answer else []

            until(lambda: ask("dbqueue_attempts_total"))
            rules = json.loads(fetch(web, "/api/v1/rules"))["data"]["groups"]
            assert [group["name"] for group in rules] == ["dbqueue"]
            for panel in json.loads(DASHBOARD.read_text())["panels"]:
                for target in panel.get("targets", []):
                    query = target["expr"].replace("$__rate_interval", "10s")
                    query = query.replace("$database", ".*")
                    until(partial(ask, query))  # Rates need two scrapes.
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(LONG)
