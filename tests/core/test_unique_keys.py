"""Model instances as keys: one saved row is one key."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import Group, User
from django.test.utils import isolate_apps

from django_dbqueue import enqueue_many, limit, pipeline, task
from django_dbqueue.compat import InvalidTask
from django_dbqueue.core.unique_keys import as_text
from django_dbqueue.models import Job, Process

from .. import tasks
from ..tasks import add

pytestmark = pytest.mark.django_db

PLACES: dict[int, object] = {}


@pytest.fixture
def group():
    return Group.objects.create(name="editors")


def keys() -> set[str | None]:
    return set(Job.objects.values_list("key", flat=True))


def test_calls_with_one_instance_share_a_row(group):
    first = add.using(key=group).enqueue(1)
    second = add.using(key=Group.objects.get()).enqueue(2)

    assert (first.id, second.enqueued) == (second.id, "merged")
    assert keys() == {f"tests.tasks.add auth.group:{group.pk}"}


def test_instances_of_other_models_with_the_same_pk_are_other_keys(group):
    user = User.objects.create(pk=group.pk, username="ann")

    add.using(key=group).enqueue(1)
    add.using(key=user).enqueue(2)

    assert len(keys()) == 2


@isolate_apps("tests")
def test_proxy_has_the_key_of_its_model():
    class Member(User):
        class Meta:
            proxy = True
            app_label = "tests"

    user = User.objects.create(username="ann")

    assert as_text(Member.objects.get(), "key") == as_text(user, "key") == f"auth.user:{user.pk}"


def test_uuid_primary_key_is_part_of_the_key(process):
    assert as_text(process, "key") == f"dbqueue.process:{process.pk}"


@pytest.mark.parametrize("fields", [{}, {"pk": 5}])
def test_unsaved_instance_is_refused(fields):
    with pytest.raises(
        InvalidTask, match=r"key is <Group: .*>, which is not in the database.*Save"
    ):
        add.using(key=Group(name="new", **fields))


def test_unsaved_instance_with_generated_id_is_refused():
    with pytest.raises(InvalidTask, match="not in the database"):
        add.using(key=Process(name="new"))


def test_instance_that_was_deleted_is_refused(group):
    keyed = add.using(key=group)
    group.delete()

    with pytest.raises(ValueError, match="not in the database"):
        keyed.enqueue(1)
    with pytest.raises(InvalidTask, match="not in the database"):
        add.using(key=group)
    assert not Job.objects.exists()


def test_key_function_may_return_an_instance(group):
    PLACES[1] = group
    keyed = task(key=lambda a: PLACES[a])(tasks.add.func)

    keyed.enqueue(1)

    assert keys() == {f"tests.tasks.add auth.group:{group.pk}"}


def test_key_function_with_an_unsaved_instance_is_refused():
    PLACES[1] = Group(name="new")
    keyed = task(key=lambda a: PLACES[a])(tasks.add.func)

    with pytest.raises(ValueError, match="return value of key is <Group: new>, which is not in"):
        keyed.enqueue(1)


def test_limit_function_may_return_an_instance(group):
    PLACES[1] = group
    limited = add.using(concurrency=limit(1, key=lambda a: PLACES[a], group="of a group"))

    limited.enqueue_many([(1,), (1,)])

    assert sorted(Job.objects.values_list("state", flat=True)) == ["blocked", "ready"]
    assert Job.objects.first().limits[0]["key"] == f'"of a group" auth.group:{group.pk}'


def test_instance_is_a_key_in_pipelines_and_bulks(group):
    pipeline(add, add).using(key=group).enqueue(1)
    enqueue_many([add.using(key=group).prepare(2), tasks.nothing.using(key=group).prepare()])

    assert Job.objects.count() == 2


@pytest.mark.parametrize("value", [object(), 1.5, b"a", ("auth.group", 1)])
def test_other_values_are_still_refused(value):
    with pytest.raises(InvalidTask, match=r"key (must be|takes)"):
        add.using(key=value)
