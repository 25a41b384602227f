#compdef can-train
_can_train() {
    local -a answers open described
    answers=("${(@f)$("${words[1]}" complete-line zsh "${(@)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)}")
    answers=(${answers:#})
    (( ${#answers} )) || { _files; return }
    # More follows a word such as `training.lr=`, so no space does. -U: some contain what is typed elsewhere.
    open=(${(M)answers:#*[=:]})
    (( ${#open} )) && compadd -U -S '' -- $open
    described=(${${${answers:#*[=:]}//:/\\:}/$'\t'/:})
    (( ${#described} )) && _describe 'can-train' described -U
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
compdef _can_train can-train
