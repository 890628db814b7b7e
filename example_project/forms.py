from django import forms


class SearchForm(forms.Form):
    """Search box: words to find in names and docstrings."""

    q = forms.CharField(
        required=False,
        max_length=100,
        widget=forms.TextInput(
            attrs={
                "type": "search",
                "placeholder": "json.loads, or words of a docstring",
                "aria-label": "Search the standard library",
            }
        ),
    )
