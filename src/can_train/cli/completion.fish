function __can_train_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l answers ($words[1] complete-line fish $words[2..] 2>/dev/null)
    if set --query answers[1]
        printf '%s\n' $answers
    else
        __fish_complete_path (commandline -ct)
    end
end
complete --command can-train --no-files --keep-order --arguments '(__can_train_complete)'
