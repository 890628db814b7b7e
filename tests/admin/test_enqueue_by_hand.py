"""Jobs enqueued by hand: a form made of the task's signature, and jobs that are run again."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any, Literal, Optional

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.test import Client
from django.urls import reverse

from django_dbqueue import task
from django_dbqueue.models import Job

from .conftest import VIEW, a_client, a_job

PATH = f"{__name__}.charge"
PLACE = {"queue_name": "default", "priority": "0", "run_after": ""}


@task(queue_name="mail", priority=7, max_attempts=3)
def charge(
    customer: int,
    text: str,
    rate: float = 0.5,
    kind: Literal["a", 2] = "a",
    is_paid: bool = False,
    note: Optional[str] = None,  # noqa: UP045
    items=None,
    *rest,
    token: str = "",
    **more: Any,
):
    """Charge a customer."""


@task(takes_context=True)
def only_positional(context, a: int, /, b: Missing = None):  # type: ignore[name-defined]  # noqa: F821
    pass


@task(key=lambda order: 1 // order)
def keyed(order: int):
    pass


def form_of(task: str = PATH) -> str:
    return reverse("admin:dbqueue_taskstate_enqueue", args=[quote(task)])


def submit(client: Client, address: str = "", **values: str) -> Any:
    given = {f"arg_{name}": value for name, value in values.items() if name not in PLACE}
    place = {name: value for name, value in values.items() if name in PLACE}
    return client.post(address or form_of(), {**PLACE, **given, **place})


def errors(response: Any) -> dict[str, list[str]]:
    return dict(response.context["form"].errors)


def test_job_is_enqueued_with_typed_arguments(operator: Client) -> None:
    response = submit(
        operator,
        customer="17",
        text=" as it is ",
        kind="2",
        is_paid="true",
        items='[1, {"a": null}]',
        more='{"colour": "red"}',
        priority="9",
        queue_name="slow",
    )

    job = Job.objects.get()
    assert response.url == reverse("admin:dbqueue_job_change", args=[job.pk])
    assert (job.args, job.queue, job.priority, job.max_attempts) == ([], "slow", 9, 3)
    assert job.kwargs == {
        "customer": 17,
        "text": " as it is ",
        "kind": 2,
        "is_paid": True,
        "items": [1, {"a": None}],
        "colour": "red",
    }
    (entry,) = LogEntry.objects.filter(object_id=job.pk)
    assert (
        entry.user.username == "operator" and entry.change_message == "Enqueued by hand: created."
    )


def test_further_arguments_follow_all_others(operator: Client) -> None:
    submit(operator, customer="17", text="x", kind="2", rest='["y", 3]', token="t", more='{"a": 1}')

    job = Job.objects.get()
    assert job.args == [17, "x", 0.5, 2, False, None, None, "y", 3]
    assert job.kwargs == {"token": "t", "a": 1}


def test_empty_fields_leave_the_defaults_to_the_function(operator: Client) -> None:
    submit(operator, customer="1", text="x", rate="", kind="", note="")

    job = Job.objects.get()
    assert (job.args, job.kwargs) == ([], {"customer": 1, "text": "x"})
    assert (job.queue, job.priority) == ("default", 0)


def test_form_begins_with_defaults_and_has_no_value_of_hidden_names(operator: Client) -> None:
    text = re.sub(r"\s+", " ", operator.get(form_of()).text)

    assert re.search(r'name="arg_customer"[^>]* required', text)
    assert "Default: 0.5." in text and "Default: &quot;a&quot;." in text
    assert '<option value="&quot;a&quot;">' in text
    assert re.search(r'type="password" name="arg_token"', text)
    assert re.search(r'name="queue_name" value="mail"', text)
    assert re.search(r'name="priority" value="7"', text)
    assert "Charge a customer." in text


@pytest.mark.parametrize(
    ("values", "field", "message"),
    [
        ({"customer": "x", "text": "a"}, "arg_customer", "Enter a whole number."),
        ({"text": "a"}, "arg_customer", "This field is required."),
        ({"customer": "1", "text": "a", "kind": '"c"'}, "arg_kind", "not one of the available"),
        ({"customer": "1", "text": "a", "items": "[1,"}, "arg_items", "This is not a JSON value"),
        ({"customer": "1", "text": "a", "rest": '{"a": 1}'}, "arg_rest", "as a JSON list"),
        ({"customer": "1", "text": "a", "queue_name": "a*"}, "queue_name", "is not a queue name"),
        (
            {"customer": "1", "text": "a", "priority": "900"},
            "priority",
            "less than or equal to 100",
        ),
        (
            {"customer": "1", "text": "a", "run_after": "2001-01-01T10:00"},
            "run_after",
            "is in the past",
        ),
        ({"customer": "1", "text": "a", "more": '{"text": "b"}'}, "__all__", ""),
        ({"customer": "1", "text": "a\x00"}, "arg_text", "Null characters"),
    ],
)
def test_bad_input_is_named_and_enqueues_nothing(
    operator: Client, values: dict[str, str], field: str, message: str
) -> None:
    response = submit(operator, **values)

    if field == "__all__":
        # An argument given twice: the last one counts.
        assert Job.objects.get().kwargs["text"] == "b"
        return
    assert message in errors(response)[field][0]
    assert not Job.objects.exists()


def test_error_of_the_tasks_own_function_is_shown(operator: Client) -> None:
    address = form_of(f"{__name__}.keyed")

    response = submit(operator, address, order="0")

    assert "ZeroDivisionError" in errors(response)["__all__"][0]
    assert not Job.objects.exists()
    submit(operator, address, order="1")
    assert Job.objects.count() == 1


def test_positional_parameters_and_unknown_hints_work(operator: Client) -> None:
    submit(operator, form_of(f"{__name__}.only_positional"), a="3", b='"x"')

    job = Job.objects.get()
    assert (job.args, job.kwargs) == ([3], {"b": "x"})


def test_null_is_a_value_and_an_empty_field_is_not(operator: Client) -> None:
    address = form_of("tests.tasks.add")
    assert 'name="arg_a" cols="40" rows="2" dir="ltr" required' in operator.get(address).text
    assert "null" not in operator.get(address).text.partition("<form")[2].partition("</form>")[0]

    assert "required" in errors(submit(operator, address))["arg_a"][0]
    submit(operator, address, a="null", b="")
    submit(operator, address, a="[]", b="null")

    jobs = Job.objects.order_by("pk")
    assert [job.kwargs for job in jobs] == [{"a": None}, {"a": [], "b": None}]


@task
def odd(
    self: int,
    one: [1, 2] = None,  # type: ignore[valid-type]
    literal: Literal["1", 1, None] = "1",
    binary: Literal[b"x"] = b"x",
    options={},  # noqa: B006
    when=timedelta(1),
    optional: Optional[int] = 5,  # noqa: UP045
    text: str = "given",
):
    pass


@task
def in_place(a, b=timedelta(1), /):
    pass


@task
def with_secrets(user, password="default", api_token: int = 3, is_hidden_secret: bool = True):
    pass


@task(key=lambda password: password)
def keyed_by_secret(password: str):
    pass


def test_odd_signatures_are_enqueued_as_they_were_given(operator: Client) -> None:
    address = form_of(f"{__name__}.odd")
    assert operator.get(address).status_code == 200
    submit(operator, address, self="7")
    submit(operator, address, self="7", literal="1", optional="null", options='{"a": []}')
    submit(operator, form_of(f"{__name__}.in_place"), a="1")

    jobs = [(job.args, job.kwargs) for job in Job.objects.order_by("pk")]
    assert jobs[0] == ([7], {})
    assert jobs[1] == ([7], {"literal": 1, "optional": None, "options": {"a": []}})
    assert jobs[2] == ([1], {})


@pytest.mark.parametrize(
    "value", ["[" * 100_000, "9" * 5000, '"\\ud800"', "1e999", "NaN", '"\\u0000"', "[1,"]
)
def test_json_that_cannot_be_stored_is_refused_and_shown_again(
    operator: Client, value: str
) -> None:
    response = submit(operator, form_of("tests.tasks.add"), a=value)

    assert response.status_code == 200 and "arg_a" in errors(response)
    assert not Job.objects.exists()


def test_task_of_another_kind_of_backend_has_no_form(operator: Client, monkeypatch: Any) -> None:
    monkeypatch.setattr("django_dbqueue.admin.tasks.backend_for", lambda task: None)

    assert operator.get(form_of()).status_code == 404


def test_call_of_a_key_says_what_became_of_it(operator: Client) -> None:
    address = form_of(f"{__name__}.keyed")
    submit(operator, address, order="1")

    second = submit(operator, address, order="1")

    page = operator.get(second.url)
    assert "has a job of" in page.text and Job.objects.count() == 1


def test_task_that_this_process_does_not_know_has_no_form(operator: Client) -> None:
    assert operator.get(form_of("shop.tasks.gone")).status_code == 404
    job = a_job(task="shop.tasks.gone")
    assert "Edit and run again" not in operator.get(page_of(job)).text


def test_form_needs_its_permission(db: Any) -> None:
    viewer = a_client("viewer only", VIEW)
    job = a_job(task=PATH, kwargs={"customer": 1, "text": "x"})

    assert viewer.get(form_of()).status_code == 403
    assert submit(viewer, customer="1", text="x").status_code == 403
    assert Client().get(form_of()).status_code == 302
    assert a_client("without view", ["enqueue_taskstate"]).get(form_of()).status_code == 403
    assert "Edit and run again" not in viewer.get(page_of(job)).text
    assert Job.objects.count() == 1


def page_of(job: Job) -> str:
    return reverse("admin:dbqueue_job_change", args=[job.pk])


class TestRunAgain:
    @pytest.fixture
    def job(self, db: Any) -> Job:
        kwargs = {
            "customer": 17,
            "text": "x",
            "token": "secret-1",
            "items": {"password": "secret-2"},
        }
        return a_job(task=PATH, args=[], kwargs=kwargs, queue="slow", priority=3)

    @pytest.fixture
    def address(self, job: Job) -> str:
        return f"{form_of()}?job={job.pk}"

    def test_form_begins_with_the_arguments_of_the_job(
        self, operator: Client, job: Job, address: str
    ) -> None:
        assert address in operator.get(page_of(job)).text.replace("&amp;", "&")

        text = operator.get(address).text

        assert re.search(r'name="arg_customer" value="17"', text)
        assert re.search(r'name="queue_name" value="slow"', text)
        assert "secret" not in text

    @pytest.mark.parametrize("is_guessed", [False, True])
    def test_changes_are_shown_before_anything_is_enqueued(
        self, operator: Client, job: Job, address: str, is_guessed: bool
    ) -> None:
        # The value that the job has counts as changed, too: else it could be guessed.
        token = "secret-1" if is_guessed else "secret-3"
        values = {"customer": "18", "text": "x", "token": token, "queue_name": "slow"}
        response = submit(operator, address, **values)

        assert Job.objects.count() == 1
        changes = response.context["form"].changes
        assert [tuple(each) for each in changes] == [
            ("customer", "17", "18"),
            ("token", "••••••", "changed"),
        ]
        digest = response.context["form"].token
        other = operator.post(
            address, {**PLACE, "arg_customer": "19", "arg_text": "x", "confirmed": digest}
        )
        assert Job.objects.count() == 1 and other.status_code == 200

        given = {f"arg_{name}": value for name, value in values.items() if name not in PLACE}
        operator.post(address, {**PLACE, **given, "queue_name": "slow", "confirmed": digest})

        new = Job.objects.exclude(pk=job.pk).get()
        assert new.kwargs == {**job.kwargs, "customer": 18, "token": token}
        assert new.queue == "slow"

    def test_hidden_values_that_are_left_empty_are_those_of_the_job(
        self, operator: Client, job: Job, address: str
    ) -> None:
        response = submit(operator, address, customer="17", text="y")
        token = response.context["form"].token
        operator.post(address, {**PLACE, "arg_customer": "17", "arg_text": "y", "confirmed": token})

        new = Job.objects.exclude(pk=job.pk).get()
        assert new.kwargs == {**job.kwargs, "text": "y"}

    def test_hidden_values_are_kept_even_with_defaults(self, operator: Client, db: Any) -> None:
        given = {"user": "ann", "password": "secret-1", "api_token": 99, "is_hidden_secret": False}
        job = a_job(task=f"{__name__}.with_secrets", kwargs=given)
        address = f"{form_of(job.task)}?job={job.pk}"
        assert "secret-1" not in operator.get(address).text

        response = submit(operator, address, user='"ann"')
        assert response.context["form"].changes == []
        token = response.context["form"].token
        operator.post(address, {**PLACE, "arg_user": '"ann"', "confirmed": token})

        assert Job.objects.exclude(pk=job.pk).get().kwargs == given

    def test_errors_do_not_show_hidden_values(self, operator: Client, db: Any) -> None:
        job = a_job(task=f"{__name__}.keyed_by_secret", kwargs={"password": "secret-1" * 99})
        address = f"{form_of(job.task)}?job={job.pk}"
        token = submit(operator, address).context["form"].token

        response = operator.post(address, {**PLACE, "confirmed": token})

        assert "ValueError" in errors(response)["__all__"][0]
        assert "secret-1" not in response.text

    def test_values_that_a_simple_field_cannot_show_are_json(
        self, operator: Client, db: Any
    ) -> None:
        given = {"customer": [1], "text": "", "is_paid": {"a": 1}, "kind": "gone", "note": None}
        job = a_job(task=PATH, kwargs=given)
        address = f"{form_of()}?job={job.pk}"
        shown = {
            name: operator.get(address).context["form"][f"arg_{name}"].value() for name in given
        }
        assert shown == {
            "customer": "[1]",
            "text": '""',
            "is_paid": '{"a": 1}',
            "kind": '"gone"',
            "note": "null",
        }

        response = submit(operator, address, **shown)

        assert response.context["form"].changes == []

    def test_confirmation_holds_for_this_priority_only(
        self, operator: Client, job: Job, address: str
    ) -> None:
        token = submit(operator, address, customer="1", text="x").context["form"].token
        data = {**PLACE, "arg_customer": "1", "arg_text": "x", "confirmed": token}

        operator.post(address, {**data, "priority": "99"})

        assert Job.objects.count() == 1

    def test_job_of_another_task_or_none_is_refused(self, operator: Client, job: Job) -> None:
        assert operator.get(f"{form_of()}?job=nonsense").status_code == 404
        other = a_job(task="shop.tasks.other")
        assert operator.get(f"{form_of()}?job={other.pk}").status_code == 404

    def test_arguments_that_no_longer_fit_are_left_out(self, operator: Client, db: Any) -> None:
        job = a_job(task=PATH, kwargs={"customer": 1, "text": "x"}, args=[1, 2, 3])

        assert operator.get(f"{form_of()}?job={job.pk}").status_code == 200
        Job.objects.filter(pk=job.pk).update(args={"not": "a list"})
        assert operator.get(f"{form_of()}?job={job.pk}").status_code == 200
