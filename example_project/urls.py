from django.contrib import admin
from django.urls import path

from . import views

urlpatterns = [
    path("", views.search, name="search"),
    path("trouble/", views.trouble, name="trouble"),
    path("admin/", admin.site.urls),
]
