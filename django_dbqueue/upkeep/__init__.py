"""What ``manage.py checkqueue`` looks at: the database around the queue, and what to change there."""
