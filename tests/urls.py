from django.conf import settings
from django.contrib import admin
from django.http import HttpResponse
from django.urls import include, path

from . import tasks


def enqueue(request):
    """Enqueue into both databases, and then perhaps fail."""
    tasks.add.enqueue(1)
    tasks.add.using(backend="other").enqueue(1)
    if request.GET["fails"] == "1":
        raise ZeroDivisionError
    return HttpResponse()


urlpatterns = [path("admin/", admin.site.urls), path("enqueue/", enqueue)]
if "grappelli" in settings.INSTALLED_APPS:
    urlpatterns.append(path("grappelli/", include("grappelli.urls")))
