"""The files in docs/deployment: their commands, numbers, probes and query, against the real ones.

Neither Docker nor Kubernetes runs here: their files are parsed and checked.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.conf import settings
from django.core.management import get_commands, load_command_class
from django.db import connection
from django.utils.timezone import now

from django_dbqueue.core.options import Options
from django_dbqueue.models import Job
from django_dbqueue.models.enums import State
from django_dbqueue.testing import drain

from . import tasks
from .conftest import LONG, a_process, address_of_the_test_database, log_of, until
from .management.test_health import ask
from .ports import free_port
from .servers import find
from .tables.test_query_plans import analyze, double, explained

FILES = settings.BASE_DIR / "docs" / "deployment"
DEFAULTS = Options()
# A project's own package, whose settings are those of the tests.
SHOP = {
    "shop/__init__.py": "",
    "shop/wsgi.py": "from django.core.wsgi import get_wsgi_application as get\napplication = get()\n",
}
queue = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def environment(**more: str) -> dict[str, str]:
    """Return that of a process in which ``python`` is this one, on the test's database."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, **address_of_the_test_database(), "PATH": path, **more}


def options_of(command: list[str]) -> dict[str, Any]:
    """Return the options of a command of manage.py, parsed by that command."""
    python, script, name = command[:3]
    assert (Path(python).name, script) == ("python", "manage.py")
    parser = load_command_class(get_commands()[name], name).create_parser("manage.py", name)
    return vars(parser.parse_args(command[3:]))


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FILES / name).read_text()))


class TestSystemd:
    @pytest.fixture
    def unit(self) -> configparser.ConfigParser:
        unit = configparser.ConfigParser(interpolation=None)
        unit.optionxform = str  # type: ignore[assignment, method-assign]
        unit.read(FILES / "runqueue.service")
        return unit

    def test_commands_are_those_of_runqueue(self, unit):
        service = unit["Service"]
        options_of(shlex.split(service["ExecStart"]))

        assert service["ExecStart"].startswith(service["WorkingDirectory"])
        assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"

    def test_times_fit_the_options(self, unit):
        service = unit["Service"]

        assert int(service["TimeoutStopSec"]) > DEFAULTS.longest_shutdown
        assert int(service["TimeoutStartSec"]) > DEFAULTS.give_up_after
        assert int(service["WatchdogSec"]) >= DEFAULTS.dead_after

    def test_it_is_started_again_without_end_and_not_as_root(self, unit):
        assert unit["Unit"]["StartLimitIntervalSec"] == "0"
        assert unit["Unit"]["Wants"] == "network-online.target"
        assert unit["Service"]["Restart"] == "always"
        assert int(unit["Service"]["RestartSec"]) > 0
        assert unit["Service"]["User"] not in ("", "root")

    def test_systemd_accepts_the_unit(self, unit, tmp_path):
        program = find("systemd-analyze")
        text = (FILES / "runqueue.service").read_text()
        home = unit["Service"]["WorkingDirectory"]
        text = text.replace(f"{home}/venv/bin/python", sys.executable).replace(home, str(tmp_path))
        (tmp_path / "runqueue.service").write_text(text)

        done = subprocess.run(
            [program, "verify", "--man=no", str(tmp_path / "runqueue.service")],
            capture_output=True,
            text=True,
        )

        assert (done.returncode, done.stderr) == (0, "")

    def test_shared_status_outlives_the_service(self, unit):
        """A successor reads which jobs had not started, so its /tmp must be the same."""
        assert "PrivateTmp" not in unit["Service"]
        assert "DynamicUser" not in unit["Service"]


class TestDocker:
    @pytest.fixture
    def instructions(self) -> list[tuple[str, str]]:
        text = re.sub(r"^#.*\n", "", (FILES / "Dockerfile").read_text(), flags=re.M)
        lines = filter(None, text.replace("\\\n", " ").splitlines())
        return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]

    def test_command_is_a_list_so_that_sigterm_arrives(self, instructions):
        assert options_of(json.loads(dict(instructions)["CMD"]))["backend"] is None
        assert "ENTRYPOINT" not in dict(instructions)

    def test_it_does_not_run_as_root(self, instructions):
        names = [name for name, _ in instructions]
        assert int(dict(instructions)["USER"]) > 0
        assert names.index("USER") < names.index("CMD")

    @queue
    @pytest.mark.parametrize(
        ("kinds", "failures", "code"),
        [([], 0, 1), (["worker", "dispatcher"], 0, 0), (["worker", "dispatcher"], 1, 0)],
        ids=["no process", "all is well", "a job has failed"],
    )
    def test_health_check_fails_only_if_jobs_do_not_run(self, instructions, kinds, failures, code):
        for kind in kinds:
            process = a_process(f"{kind}@a:1:x", kind=kind, details={"queues": "*"})
            process.save(using="other", force_insert=True)
        for _ in range(failures):
            tasks.fail.enqueue()
            drain()
        command = dict(instructions)["HEALTHCHECK"].partition(" CMD ")[2]
        options_of(shlex.split(command)[:3])

        done = subprocess.run(["sh", "-c", command], env=environment(), cwd=settings.BASE_DIR)

        assert done.returncode == code

    def test_compose_runs_commands_that_exist(self):
        (compose,) = documents("compose.yaml")
        services = compose["services"]

        options_of(services["queue"]["command"])
        options_of(services["migrate"]["command"])
        assert services["web"]["command"][0] == "gunicorn"
        assert int(services["queue"]["stop_grace_period"].rstrip("s")) > DEFAULTS.longest_shutdown
        # The image's health check is that of the queue.
        assert [name for name, each in services.items() if "healthcheck" not in each] == ["queue"]

    def test_compose_migrates_once_and_before_all_others(self):
        (compose,) = documents("compose.yaml")
        services = compose["services"]
        done = {"migrate": {"condition": "service_completed_successfully"}}

        assert services["web"]["depends_on"] == services["queue"]["depends_on"] == done
        assert services["migrate"]["depends_on"] == {"db": {"condition": "service_healthy"}}
        assert "restart" not in services["migrate"]


class TestKubernetes:
    @pytest.fixture
    def deployment(self) -> Any:
        return next(it for it in documents("kubernetes.yaml") if it["kind"] == "Deployment")

    @pytest.fixture
    def pod(self, deployment) -> Any:
        return deployment["spec"]["template"]["spec"]

    def test_commands_are_those_of_manage_py(self, pod):
        job = next(each for each in documents("kubernetes.yaml") if each["kind"] == "Job")
        (migrate,) = job["spec"]["template"]["spec"]["containers"]
        (wait,), (runs,) = pod["initContainers"], pod["containers"]

        assert options_of(migrate["args"])["check_unapplied"] is False
        assert options_of(wait["args"])["check_unapplied"] is True
        options_of(runs["args"])
        assert len({each["image"] for each in (migrate, wait, runs)}) == 1
        assert migrate["envFrom"] == wait["envFrom"] == runs["envFrom"]

    def test_grace_period_is_longer_than_a_shutdown(self, pod):
        assert pod["terminationGracePeriodSeconds"] > DEFAULTS.longest_shutdown

    def test_pods_are_those_of_the_selector(self, deployment):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"] == labels

    def test_user_is_that_of_the_image(self, pod):
        assert f"USER {pod['securityContext']['runAsUser']}\n" in (FILES / "Dockerfile").read_text()

    def test_temporary_files_can_be_written_and_outlive_the_container(self, pod):
        (container,) = pod["containers"]
        assert container["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]
        assert pod["volumes"] == [{"name": "tmp", "emptyDir": {}}]

    @queue
    def test_probes_are_answered(self, pod, runqueue):
        (container,) = pod["containers"]
        address, named = options_of(container["args"])["health_port"]
        (port,) = container["ports"]
        probes = [container[f"{each}Probe"] for each in ("startup", "liveness", "readiness")]
        assert address == "0.0.0.0" and port["containerPort"] == named
        assert {probe["httpGet"]["port"] for probe in probes} == {port["name"]}
        free = free_port()

        runqueue(*[arg.replace(str(named), str(free)) for arg in container["args"][3:]])

        for probe in probes:
            until(lambda path=probe["httpGet"]["path"]: ask(free, path) == (200, "ok\n"))
        assert probes[2]["httpGet"]["path"] == "/ready"
        assert {probe["httpGet"]["path"] for probe in probes[:2]} == {"/live"}


class TestKeda:
    @pytest.fixture
    def scaled(self) -> Any:
        return next(it for it in documents("keda.yaml") if it["kind"] == "ScaledObject")

    @pytest.fixture
    def query(self, scaled) -> str:
        (trigger,) = scaled["spec"]["triggers"]
        assert trigger["type"] == "postgresql"
        return trigger["metadata"]["query"]

    def test_it_scales_the_deployment_and_never_to_zero(self, scaled):
        kinds = {each["kind"]: each for each in documents("kubernetes.yaml")}
        (trigger,) = scaled["spec"]["triggers"]
        authentication = next(
            each for each in documents("keda.yaml") if each["kind"] == "TriggerAuthentication"
        )

        deployment = kinds["Deployment"]
        assert scaled["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
        assert scaled["spec"]["minReplicaCount"] >= 1
        assert int(trigger["metadata"]["targetQueryValue"]) == DEFAULTS.threads
        assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        (secret,) = authentication["spec"]["secretTargetRef"]
        assert {"secretRef": {"name": secret["name"]}} in container["envFrom"]

    def test_query_reads_no_more_than_the_largest_number_of_replicas_needs(self, scaled, query):
        (trigger,) = scaled["spec"]["triggers"]
        wanted = int(trigger["metadata"]["targetQueryValue"]) * scaled["spec"]["maxReplicaCount"]

        assert min(int(each) for each in re.findall(r"LIMIT (\d+)", query)) > wanted

    @pytest.mark.django_db
    @pytest.mark.skipif(connection.vendor != "postgresql", reason="The scaler is PostgreSQL's.")
    def test_query_counts_ready_and_running_jobs_by_their_indexes(self, query):
        worker = a_process("worker@a:1:x")
        counted = [Job(task="t") for _ in range(20)]
        counted += [
            Job(task="t", state=State.RUNNING, attempt=1, process_id=worker.pk, started_at=now())
            for _ in range(5)
        ]
        others = [Job(task="t", state=State.SCHEDULED, run_after=now()) for _ in range(50)]
        others += [
            Job(task="t", state=State.SUCCESSFUL, attempt=1, finished_at=now()) for _ in range(50)
        ]
        Job.objects.bulk_create([*counted, *others])
        double(Job.objects.filter(state=State.SUCCESSFUL), times=8)
        analyze()

        with connection.cursor() as cursor:
            cursor.execute(query)
            assert cursor.fetchall() == [(25,)]
        plan = explained(query)
        assert "dbqueue_job_lane" in plan and "dbqueue_job_running" in plan, plan
        assert "Seq Scan" not in plan and "Sort" not in plan, plan


class TestProcfile:
    @pytest.fixture
    def commands(self) -> dict[str, list[str]]:
        lines = (FILES / "Procfile").read_text().splitlines()
        return {name: shlex.split(text) for name, _, text in (it.partition(": ") for it in lines)}

    @pytest.fixture
    def start(self, tmp_path) -> Iterator[Any]:
        """Run a command in a project's folder, as a platform does."""
        for name, text in SHOP.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        shutil.copy(settings.BASE_DIR / "manage.py", tmp_path)
        started = []

        def start(command: list[str], **env: str) -> subprocess.Popen[str]:
            with (tmp_path / f"{len(started)}.log").open("w") as log:
                child = subprocess.Popen(
                    command,
                    env=environment(PYTHONPATH=str(settings.BASE_DIR), **env),
                    cwd=tmp_path,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            child.log = log  # type: ignore[attr-defined]
            started.append(child)
            return child

        yield start
        for child in started:
            child.kill()
            child.wait()

    def test_shutdown_ends_before_the_platform_kills(self, commands):
        given = options_of(commands["worker"])["shutdown_timeout"]

        assert Options(shutdown_timeout=given).longest_shutdown < 30

    @queue
    def test_worker_and_release_run(self, commands, start):
        release = start(commands["release"])
        assert release.wait(LONG) == 0, log_of(release)

        worker = start(commands["worker"])
        assert tasks.nothing.enqueue().wait(LONG)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(LONG) == 0, log_of(worker)

    @queue
    def test_web_listens(self, commands, start):
        port = free_port()
        web = start(commands["web"], PORT=str(port))

        until(lambda: ask(port, "/")[0] or web.poll() is not None)
        assert web.poll() is None, log_of(web)
        web.send_signal(signal.SIGTERM)
        assert web.wait(LONG) == 0


def test_every_file_is_explained_in_the_page():
    page = (FILES.parent / "deployment.md").read_text()

    assert [each.name for each in FILES.iterdir() if f"](deployment/{each.name})" not in page] == []
