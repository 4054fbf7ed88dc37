# SPDX-License-Identifier: Apache-2.0
# What the shell scripts answer before they do anything. Each one names its options in the comment at
# its top that begins with "usage:", or has a parser in Python that needs the standard library alone.

# Where the modules of the scripts are, and those of SGLang's and vLLM's servers on a CPU.
modules="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
modules="$modules:${modules%/*}/tests/support"

# is_help_asked WORDS...: what follows -- is for somebody else.
is_help_asked() {
  local word
  for word in "$@"; do
    case "$word" in
      --) return 1 ;;
      --help | -h) return 0 ;;
    esac
  done
  return 1
}

# answer_help WORDS...: prints the script's usage and ends it, if that is what the words ask for.
answer_help() {
  if is_help_asked "$@"; then
    sed -n '/^# usage:/,/^[^#]\|^$/{/^#/s/^# \{0,1\}//p}' "$0"
    exit 0
  fi
}

# refuse SENTENCE: ends the script because of what it was told.
refuse() {
  echo "${0##*/}: $1 (--help lists the options)" >&2
  exit 2
}

is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# find_python: the first python >= 3.11 on the path.
find_python() {
  local candidate
  for candidate in python3 python3.11 python3.12 python3.13 python; do
    if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

# check_words MODULE WORDS...: lets the module's parser answer --help and refuse what it does not know,
# in any Python of this machine. Returns if there is something to be done.
check_words() {
  local python
  python="$(find_python)" || refuse "there is no python >= 3.11 on the path"
  PYTHONPATH="$modules" "$python" -m "$@" || exit
  if is_help_asked "${@:2}"; then
    exit 0
  fi
}
