_can_train() {
    local answer
    COMPREPLY=()
    # Not split by the shell, which would expand `*` in an answer; and bash 3 has no mapfile.
    while IFS= read -r answer; do
        COMPREPLY+=("$answer")
    done < <("${COMP_WORDS[0]}" complete-line bash "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
    # More follows a word such as `training.lr=`, so no space does.
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=:] ]] && compopt -o nospace
}
complete -o default -F _can_train can-train
