# find_python prints the Python that the pinned versions are installed for: $PYTHON, or the first that is found of the
# tested ones. To be sourced.

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.10 python3 python}; do
        "$candidate" -c 'import sys, venv; sys.exit(sys.version_info[:2] not in [(3, 10), (3, 11), (3, 12)])' 2>/dev/null || continue
        echo "$candidate"
        return
    done
    echo "Python 3.10, 3.11 or 3.12 with its venv module is needed, but none of these is one:" \
        "${PYTHON:-python3.11, python3.12, python3.10, python3, python}" >&2
    return 1
}
