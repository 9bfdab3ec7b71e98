//! Texts of others made safe to stand in a page. Names of classes, settings and metrics come from files and folders.

/// A text inside an element or a quoted attribute.
pub(super) fn html(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            // Characters that HTML does not allow, not even escaped.
            '\n' | '\t' | '\r' => out.push(c),
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// JSON inside a script element: it must not be able to end it. `<` only occurs in strings, where it may be escaped.
pub(super) fn script(json: &str) -> String {
    json.replace('<', "\\u003c").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_gets_out() {
        for (text, want) in [
            ("plain", "plain"),
            ("<b a=\"1\" c='2'>&amp;", "&lt;b a=&quot;1&quot; c=&#39;2&#39;&gt;&amp;amp;"),
            ("a\u{0}b\u{1b}c\n", "a\u{fffd}b\u{fffd}c\n"),
        ] {
            assert_eq!(html(text), want);
        }
        let json = serde_json::json!({"name": "</script><!--\u{2028}"}).to_string();
        let safe = script(&json);
        assert!(!safe.contains('<') && !safe.contains('\u{2028}'), "{safe}");
        let back: serde_json::Value = serde_json::from_str(&safe).unwrap();
        assert_eq!(back["name"], "</script><!--\u{2028}");
    }
}
